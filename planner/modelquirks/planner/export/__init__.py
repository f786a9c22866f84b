"""Export: any checkpoint that can be read as sharded safetensors, in bounded memory, or not at all.

``layout`` says what goes where, ``outfolder`` sees to it that a folder gets its name when it is
whole, ``writing`` makes the tensors and writes them, ``readback`` reads them again, and ``perform``
is the way through.
"""
