"""Checkpoints on disk: what their files hold, and how each becomes an index and values.

`native` is remesh's own format; the others belong to other systems. `table` knows them all and
finds out which one is at a place. What another package needs to bring one is named here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.formats.building import IndexBuilder as IndexBuilder
    from remesh.formats.writer import Writer as Writer
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {"remesh.formats.building": ("IndexBuilder",), "remesh.formats.writer": ("Writer",)},
    )

__all__ = ["IndexBuilder", "Writer"]
