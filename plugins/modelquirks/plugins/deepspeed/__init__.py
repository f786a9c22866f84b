"""Training checkpoints of DeepSpeed, read without DeepSpeed and without running their pickles.

Rules and names are those of DeepSpeed 0.19.8 (``runtime/engine.py``, ``checkpoint/constants.py``);
what they give was compared bit for bit with checkpoints that it wrote. Nothing is imported here:
start with :func:`modelquirks.plugins.deepspeed.structure.read_structure`.
"""
