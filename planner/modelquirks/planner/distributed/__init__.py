"""Beyond one process: a sharded model, filled by ranks that read only what each of them needs.

All that imports ``torch.distributed`` is here.
"""
