"""How the sharded and the common part of a checkpoint are written and read.

`base` has the classes that a strategy of one's own derives from and the registry that finds a
strategy by action, backend and version. `native` has what all backends share and remesh's own
format, `torch` that of torch.distributed.checkpoint, the default, `zarr` the older one.
`fully_parallel` wraps a strategy so that ranks that hold the same shards share the work;
`async_utils` runs the slow half of a save beside the training.
"""
