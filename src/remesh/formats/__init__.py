"""Checkpoints on disk: what their files hold, and how each becomes an index and values.

`native` is remesh's own format; the others belong to other systems. `table` knows them all and
finds out which one is at a place. A `Source` names the place and says how it is to be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remesh.formats.table import Source as Source
else:
    from remesh._lazy import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, {"remesh.formats.table": ("Source",)})

__all__ = ["Source"]
