"""Checkpoints on disk: what their files hold, and how each becomes an index and values.

`native` is remesh's own format; the others belong to other systems. `table` knows them all and
finds out which one is at a place.
"""
