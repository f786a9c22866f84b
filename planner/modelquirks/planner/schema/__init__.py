"""The published schemas of files that other programs may read."""
