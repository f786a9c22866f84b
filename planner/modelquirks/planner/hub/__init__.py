"""Checkpoints in repositories on the hub: planned from ranges of bytes, fetched when executed.

Everything here goes through huggingface_hub, which is imported only when a repository is asked for.
"""
