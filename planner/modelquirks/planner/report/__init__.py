"""Reports that people look at: what they hold (``gather``), and one HTML file of it (``page``)."""
