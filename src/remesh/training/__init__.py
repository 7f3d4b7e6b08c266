"""What a training script uses: when to save, what to keep, how to resume as the same run.

`manager` is the place to begin: `Manager` wires the rest together. `policies` and `retention`
decide when to save and what to keep, `catalog` lists, marks and removes checkpoints, `resuming`
loads the newest that can be loaded, `rng` keeps random numbers by role, `provenance` says where a
checkpoint comes from, `watch` hears signals and requests. `sampling`, `steps`, `scaling` and
`trackers` are for the script itself: which samples come next, what a step means on another number
of ranks, which learning rate then, and which curves to go on with.
"""
