"""Every format that remesh reads passes one suite, on files that its own library wrote."""

from __future__ import annotations

import json
import pickle
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import remesh
from remesh.core.dtypes import BY_NAME
from remesh.core.geometry import Box, uncovered
from remesh.core.index import Index
from remesh.errors import CorruptCheckpointError
from remesh.formats.table import FORMATS, place_of, read_contents
from remesh.pipeline.source import TensorSource
from remesh.storage import Storage
from tests.support.zarr_files import write_zarr

ELSEWHERE = {
    "paddle": "recorded files: tests/compat/test_flex_paddle.py",
    "deepspeed": "recorded files: tests/formats/test_deepspeed.py",
    "flat_param": "the files of its program: tests/compat/test_atorch_files.py",
}
"""Where the formats are tested that are not here."""


Arrays = Mapping[str, npt.NDArray[Any]]
Write = Callable[[Arrays, Path], None]


def write_native(arrays: Arrays, folder: Path) -> None:
    remesh.save(dict(arrays), folder)


def write_dcp(arrays: Arrays, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        state = {name: torch.tensor(array) for name, array in arrays.items()}
        dcp.state_dict_saver.save(state, storage_writer=FileSystemWriter(folder))


def write_dcp_by_remesh(arrays: Arrays, folder: Path) -> None:
    remesh.save(dict(arrays), folder, format="torch_dcp")


def write_torch_file(arrays: Arrays, folder: Path) -> None:
    torch.save({name: torch.tensor(a) for name, a in arrays.items()}, folder / "state.pt")


def write_safetensors_file(arrays: Arrays, folder: Path) -> None:
    save_file(dict(arrays), folder / "weights.safetensors")


def write_safetensors_folder(arrays: Arrays, folder: Path) -> None:
    for number, (name, array) in enumerate(arrays.items()):
        save_file({name: array}, folder / f"{number}.safetensors")


def write_safetensors_parts(arrays: Arrays, folder: Path) -> None:
    """As DCP's Hugging Face writer leaves them: each file has a part of each tensor."""
    for part in range(2):
        cut = {name: np.array_split(array, 2)[part] for name, array in arrays.items()}
        offsets = {
            name: {"saved_offsets": [(len(array) + 1) // 2 * part, *[0] * (array.ndim - 1)]}
            for name, array in arrays.items()
        }
        path = folder / f"shard-{part}.safetensors"
        save_file(cut, path, {"DCP_SHARDING_INFO": json.dumps(offsets)})


def write_huggingface(arrays: Arrays, folder: Path) -> None:
    save_file(dict(arrays), folder / "model.safetensors")


def write_huggingface_in_several_files(arrays: Arrays, folder: Path) -> None:
    places = {name: f"model-{n:05d}-of-9.safetensors" for n, name in enumerate(arrays)}
    for name, file in places.items():
        save_file({name: arrays[name]}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index)


WRITERS: dict[Write, tuple[str, str]] = {
    write_native: ("remesh", ""),
    write_dcp: ("torch_dcp", ""),
    write_dcp_by_remesh: ("torch_dcp", ""),
    write_zarr: ("zarr", ""),
    write_torch_file: ("torch_file", "state.pt"),
    write_safetensors_file: ("safetensors", "weights.safetensors"),
    write_safetensors_folder: ("safetensors", ""),
    write_safetensors_parts: ("safetensors", ""),
    write_huggingface: ("huggingface", ""),
    write_huggingface_in_several_files: ("huggingface", ""),
}
"""What writes a checkpoint → the format that must be recognised, and the file that is opened."""


ARRAYS: dict[str, npt.NDArray[Any]] = {
    "model.weight": np.random.default_rng(0).random((33, 17), dtype=np.float32),
    "model.bias": np.random.default_rng(1).random(17),
    "steps": np.arange(24, dtype=np.int64).reshape(2, 3, 4),
    "mask": np.random.default_rng(2).random((5, 7)) > 0.5,
}
Opened = tuple[Storage, Index]


@pytest.fixture(params=WRITERS, ids=lambda write: write.__name__)
def writer(request: pytest.FixtureRequest) -> Write:
    chosen: Write = request.param
    return chosen


def open_in(folder: Path, writer: Write) -> Opened:
    """What the writer has written."""
    name, file = WRITERS[writer]
    place = place_of(folder / file)
    contents = read_contents(place)
    assert contents.format == name
    return place.storage, contents.index


@pytest.fixture
def opened(writer: Write, tmp_path: Path) -> Opened:
    writer(ARRAYS, tmp_path)
    return open_in(tmp_path, writer)


def test_names_dtypes_and_shapes(opened: Opened) -> None:
    _, index = opened
    assert set(index) == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert (index[name].dtype, index[name].shape) == (array.dtype.name, array.shape)


def test_pieces_cover_each_tensor_once(opened: Opened) -> None:
    _, index = opened
    for name, stored in index.items():
        boxes = [piece.box for piece in index.pieces(name)]
        assert uncovered(Box.whole(stored.shape), boxes) == []
        assert sum(box.size for box in boxes) == Box.whole(stored.shape).size


def test_pieces_lie_in_their_files(opened: Opened) -> None:
    storage, index = opened
    sizes = {file.path: storage.size(file.path) for file in index.files}
    assert sizes == {file.path: file.num_bytes for file in index.files}
    for name, stored in index.items():
        for piece in index.pieces(name):
            assert piece.num_bytes == piece.box.size * BY_NAME[stored.dtype].itemsize
            assert 0 <= piece.position <= sizes[piece.path] - piece.num_bytes


def test_contents_whole_and_in_part(opened: Opened) -> None:
    storage, index = opened
    for name, array in ARRAYS.items():
        whole = Box.whole(array.shape)
        inner = Box(tuple(n // 3 for n in array.shape), tuple(n - n // 3 for n in array.shape))
        for box in (whole, inner):
            found = TensorSource(storage, index).read([(name, box)])[0]
            np.testing.assert_array_equal(found, array[box.slices], name)


def test_a_missing_file_is_named(opened: Opened, tmp_path: Path) -> None:
    storage, index = opened
    name = next(iter(ARRAYS))
    path = index.pieces(name)[0].path
    (tmp_path / path).unlink()
    with pytest.raises(CorruptCheckpointError, match=Path(path).name):
        TensorSource(storage, index).read([(name, Box.whole(index[name].shape))])[0]


@pytest.mark.parametrize("fault", ["hole", "overlap"])
def test_parts_in_several_files_must_cover_a_tensor_once(fault: str, tmp_path: Path) -> None:
    """As after a save by fewer ranks into a folder where files of more ranks lie."""
    extents = {"hole": [(0, 2), (4, 6)], "overlap": [(0, 3), (3, 6), (2, 4)]}[fault]
    for number, (start, stop) in enumerate(extents):
        offsets = json.dumps({"w": {"saved_offsets": [start, 0]}})
        path = tmp_path / f"shard-{number}.safetensors"
        save_file({"w": np.ones((stop - start, 2))}, path, {"DCP_SHARDING_INFO": offsets})
    with pytest.raises(CorruptCheckpointError, match=r"w: its parts in [23] files do not cover it"):
        remesh.Checkpoint(tmp_path)


def test_every_format_is_tested() -> None:
    here = {name for name, _ in WRITERS.values()}
    assert here | ELSEWHERE.keys() == {row.name for row in FORMATS}
    assert here.isdisjoint(ELSEWHERE)


# ---------------------------------------------------------------------------------------------
# Damage
# ---------------------------------------------------------------------------------------------


def cut(num_bytes: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:num_bytes]


def replaced(content: bytes) -> Callable[[bytes], bytes]:
    return lambda _: content


def header(text: bytes, data: bytes = b"") -> Callable[[bytes], bytes]:
    """A safetensors file of a header."""
    return replaced(struct.pack("<Q", len(text)) + text + data)


MISSING = replaced(b"")
DCP, ZARR, FILE, WEIGHTS = write_dcp, write_zarr, write_torch_file, write_huggingface
Damage = tuple[Write, str, Callable[[bytes], bytes], str]

DAMAGES: dict[str, Damage] = {
    "DCP: data cut": (DCP, "__0_0.distcp", cut(3000), "cut short"),
    "DCP: data missing": (DCP, "__0_0.distcp", MISSING, "missing"),
    "DCP: metadata cut": (DCP, ".metadata", cut(500), "not a pickle"),
    "DCP: metadata empty": (DCP, ".metadata", cut(0), "not a pickle"),
    "DCP: other metadata": (DCP, ".metadata", replaced(pickle.dumps({"a": 1})), "not the metadata"),
    "DCP: heads overwritten": (DCP, "__0_0.distcp", lambda whole: bytes(len(whole)), "__0_0"),
    "zarr: missing": (ZARR, "w/0", MISSING, "missing"),
    "zarr: short": (ZARR, "w/0", cut(-1), "bytes long, where"),
    "zarr: description": (ZARR, "w/.zarray", replaced(b'{"shape": [-1]}'), "not the JSON"),
    "torch.save: half": (FILE, "state.pt", cut(2000), "not an archive"),
    "torch.save: cut": (FILE, "state.pt", cut(-10), "not an archive"),
    "torch.save: its mark": (FILE, "state.pt", replaced(b"PK"), "not an archive"),
    "torch.save: empty": (FILE, "state.pt", cut(0), "not an archive"),
    "safetensors: cut": (WEIGHTS, "model.safetensors", cut(-1), "its header says"),
    "safetensors: longer": (
        WEIGHTS,
        "model.safetensors",
        lambda whole: whole + b"x",
        "header says",
    ),
    "safetensors: header cut": (WEIGHTS, "model.safetensors", cut(20), "cut short"),
    "safetensors: empty": (WEIGHTS, "model.safetensors", cut(0), "too short"),
    "safetensors: absurd length": (
        *(WEIGHTS, "model.safetensors", replaced(b"\xff" * 9), "not a safetensors file"),
    ),
    "safetensors: length beyond the file": (
        *(WEIGHTS, "model.safetensors", replaced(struct.pack("<Q", 1 << 29) + b"{}"), "cut short"),
    ),
    "safetensors: no JSON": (
        *(WEIGHTS, "model.safetensors", header(b"{" * 100), "not a safetensors header"),
    ),
    "safetensors: nested": (
        *(WEIGHTS, "model.safetensors", header(b'{"a":' + b"[" * 9999), "not a safetensors header"),
    ),
    "safetensors: huge shape": (
        WEIGHTS,
        "model.safetensors",
        header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
        "too large",
    ),
    "safetensors: wrong size": (
        WEIGHTS,
        "model.safetensors",
        header(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
        "4 bytes for shape",
    ),
}
"""What wrote a checkpoint, the file that is damaged and how, and what is said."""


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_an_error_before_anything_changes(kind: str, tmp_path: Path) -> None:
    write, name, change, says = DAMAGES[kind]
    write({"w": np.arange(1000, dtype=np.float32)}, tmp_path)
    path = tmp_path / name
    content = path.read_bytes()
    path.unlink()
    if change is not MISSING:
        path.write_bytes(change(content))
    target = torch.zeros(1000)
    with pytest.raises(CorruptCheckpointError, match=says) as caught:
        remesh.load({"w": target}, tmp_path / WRITERS[write][1])
    assert path.name in str(caught.value)
    assert not target.any()
