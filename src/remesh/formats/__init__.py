"""Directories on disk ↔ index and values: one file for each format.

`native` is remesh's own, specified in `docs/format.md`.
"""
