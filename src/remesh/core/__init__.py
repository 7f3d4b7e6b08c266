"""Data without torch, files or messages: boxes and dtypes, the index, values, digests, memory.

Everything above is made of these. From the ground up:

- `geometry`, `strided`, `dtypes`: boxes of index space, and elements in memory
- `pieces`, `packing`, `tables`, `coverage`: many pieces of many tensors, as columns
- `index`, `integrity`: a checkpoint as files, pieces and digests
- `sharded`, `state`, `values`: a state as names, sharded tensors and plain values
- `memory`, `host_memory`, `safetensors_file`, `compression`, `collector`: bytes of this process
"""
