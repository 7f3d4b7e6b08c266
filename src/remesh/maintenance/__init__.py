"""Maintenance of stored checkpoints: repair what is damaged, remove what killed saves left.

`repair` makes a new checkpoint of what its scan finds whole in a damaged one.
`orphans` finds and removes files that no commit record refers to. Nothing here needs torch.
"""
