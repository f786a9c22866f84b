"""A plan carried out: tensors read and made, given to accelerate, verified.

These modules import torch.
"""
