"""Inference of quirks: what maps a checkpoint's names to a model's, from names and shapes alone."""
