"""Digests: the SHA-256 of every tensor of a checkpoint, to tell later whether it is the same."""
