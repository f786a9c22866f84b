"""Adapters: small changes of a base model that are stored apart from it, planned with it."""
