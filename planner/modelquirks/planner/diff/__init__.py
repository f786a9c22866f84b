"""What differs between two checkpoints, or two plans: ``sides`` reads them, ``compare`` tells."""
