"""Files of `torch.save`: one archive with a nested state in it, read as it lies.

Names are the keys on the way to each tensor or value, joined by dots. A tensor that shares its
storage with another, whole or in part, is a range of the same bytes. What is not a dict is called
`value`.
"""

from __future__ import annotations

import io
from collections.abc import Collection

from remesh.formats.archive import Archive, RangeFile, read_archive
from remesh.formats.building import IndexBuilder, Listing, file_size
from remesh.formats.contents import Contents, Place
from remesh.storage import Storage

NAME = "torch_file"
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
LOOKS_FOR = "a single file *.pt, *.pth, *.bin or *.ckpt (torch.save)"


def recognise(place: Place) -> bool:
    """True if a place is such a file, or holds one and nothing else."""
    return place.file.endswith(SUFFIXES) if place.file else is_single(place.listing)


def is_single(paths: Collection[str]) -> bool:
    """True if the only file is one."""
    return len(paths) == 1 and all(path.endswith(SUFFIXES) for path in paths)


def read(place: Place) -> Contents:
    """Read what such a file holds; its tensors stay where they are."""
    files = place.listing_beside
    path = place.file or min(files, default="")
    builder = IndexBuilder(place.storage, files)
    builder.add_nested((), open_archive(place.storage, path, files, allow=place.allow), path)
    return Contents.of(NAME, builder)


def open_archive(
    storage: Storage, path: str, listing: Listing, *, allow: Collection[str] = ()
) -> Archive:
    """The archive that a whole file is; its size may be known from a listing."""
    raw = RangeFile(storage, path, 0, file_size(storage, listing, path))
    return read_archive(io.BufferedReader(raw, 1 << 16), f"{storage.url}/{path}", allow=allow)
