"""Runs of like objects in a pickle: columns say what the objects say, one by one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import remesh
from remesh.formats.pickle_reader import parse
from remesh.formats.pickle_records import Rows
from remesh.formats.torch_dcp import ROWS, boxes_of, places_of
from remesh.sharding import Box, Part

NUMBERS = st.sampled_from((0, 1, 106, 148, 255, 256, 65535, 65536, 2**31, 2**40, 2**55))
SIZES = st.integers(0, 5).flatmap(lambda n: st.lists(NUMBERS, min_size=n, max_size=n))
NAMES = st.sampled_from(("a", "fqn", "offset", "layer.weight", "ä" * 9, "\x94", "n" * 300))


@st.composite
def metadata(draw: st.DrawFn) -> Metadata:
    """Metadata of DCP with numbers of every width, and texts that are shared or not."""
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for number, name in enumerate(draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))):
        sizes = draw(st.lists(SIZES, min_size=1, max_size=3))
        num_chunks = draw(st.integers(1, 12))
        chunks = []
        for chunk in range(num_chunks):
            size = torch.Size(sizes[chunk % len(sizes)])
            offset = torch.Size((*size[:-1], chunk)) if size else size
            chunks.append(ChunkStorageMetadata(offset, size))
            own = "".join(list(name)) if draw(st.booleans()) else name
            place = None if draw(st.integers(0, 9)) == 0 else (number, chunk, *offset)
            index = draw(st.sampled_from((None, 0, 300)))
            file = f"__{chunk % 2}_0.distcp"
            storage[MetadataIndex(own, place, index)] = _StorageInfo(file, draw(NUMBERS), 7)
        if draw(st.booleans()):
            chunks.append(chunks[0])  # taken again
        entries[name] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size(sizes[0]), chunks
        )
    return Metadata(entries, None, storage)


def said(data: bytes, rows: Any) -> tuple[list[Any], list[Any], int]:
    root = parse(data, "here", rows).root
    num_rows = 0
    chunks = []
    for name, entry in root.field("state_dict_metadata").items():
        for item in entry.field("chunks"):
            if isinstance(item, Rows):
                num_rows += item.count
                chunks += [(name, *row) for row in zip(*item.columns, strict=True)]
            else:
                num_dims = len(item.field("sizes").args[0])
                chunks += [(name, *box) for box in boxes_of([item], num_dims, "here")]
    places = []
    for key, info in root.field("storage_data").items():
        num_rows += key.count if isinstance(key, Rows) else 0
        places += list(places_of(key, info, "here"))
    return chunks, places, num_rows


@settings(max_examples=60, deadline=None)
@given(metadata(), st.sampled_from((4, 5)))
def test_columns_say_what_the_objects_say(what: Metadata, protocol: int) -> None:
    data = pickle.dumps(what, protocol)
    chunks, places, none = said(data, ())
    assert none == 0
    assert said(data, ROWS)[:2] == (chunks, places)
    assert len(places) == len(what.storage_data)


def test_what_remesh_writes_is_read_as_columns(tmp_path: Path) -> None:
    parts = tuple(Part(Box((n, 0), (1, 2)), torch.full((1, 2), n)) for n in range(300))
    remesh.save({"w": remesh.ShardedTensor("w", (300, 2), parts)}, tmp_path, format="torch_dcp")
    *found, num_rows = said((tmp_path / ".metadata").read_bytes(), ROWS)
    assert [len(items) for items in found] == [300, 300]
    assert num_rows > 550
    written = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["w"]
    assert isinstance(written, TensorStorageMetadata)
    assert written.size == (300, 2)
