"""Checkpoints that Paddle wrote (3.3.1, two ranks), loaded as they are."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import remesh
from remesh.compat.flex_checkpoint import load_state_dict
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    StateError,
)
from remesh.exchange import Exchange
from remesh.formats import paddle
from remesh.formats.building import IndexBuilder
from remesh.formats.pickle_records import Record
from remesh.formats.pickle_writer import dumps
from remesh.formats.place import Place
from remesh.storage import MemoryStorage, Storage, open_storage
from tests.compat.flex_layouts import Weights, cut, filled, flat, whole
from tests.support import run_ranks

DATA = Path(__file__).parents[1] / "data" / "paddle"
CONTENT: dict[str, dict[str, Any]] = json.loads((DATA / "EXPECTED.json").read_text())
DIRECTORIES = ["two_rank", "flat3d"]


def expected(directory: str) -> dict[str, torch.Tensor]:
    found = {}
    for name, spec in CONTENT[directory].items():
        dtype = getattr(torch, spec["dtype"])
        size = math.prod(spec["shape"])
        values = spec.get("values") or range(spec["start"], spec["start"] + size)
        found[name] = torch.tensor(list(values), dtype=dtype).reshape(spec["shape"])
    return found


def check(path: Path, wanted: Weights, **options: Any) -> None:
    filled(lambda target: load_state_dict(target, path, **options), wanted)


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_every_tensor_alone(directory: str) -> None:
    wanted = whole(expected(directory))
    check(DATA / directory, wanted)
    check(DATA / directory, wanted, unique_id=0)


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_as_a_format_of_the_engine(directory: str) -> None:
    checkpoint = remesh.Checkpoint(DATA / directory)
    assert checkpoint.format == "paddle"
    tensors = expected(directory)
    assert sorted(checkpoint.index) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor), name
    assert not checkpoint.verify().has_digests
    assert checkpoint.state().keys() == tensors.keys()


def _other_layouts(exchange: Exchange) -> None:
    rank, tensors = exchange.rank, expected("two_rank")
    moment = "norm2.weight.moment1_0"
    wanted = {
        "col.weight": cut("col.weight", tensors["col.weight"], 0, rank, 2),
        "row.weight": cut("row.weight", tensors["row.weight"], 1, rank, 2),
        **whole({"col.bias": tensors["col.bias"]}),
        moment: flat(whole(tensors)[moment], *[(0, 13), (13, 24)][rank]),
    }
    if rank:
        wanted |= whole({"stage1.weight": tensors["stage1.weight"]})
    check(DATA / "two_rank", wanted, process_group=exchange)
    ranges = {"m": flat(whole(expected("flat3d"))["m"], *[(3, 7), (9, 23)][rank])}
    check(DATA / "flat3d", ranges, process_group=exchange)


def test_other_layouts() -> None:
    run_ranks(2, _other_layouts)


def test_statements() -> None:
    tensors = expected("two_rank")
    wanted = whole({"both": torch.cat([tensors["row.weight"], tensors["row.weight"]])})
    statements = ["row.weight, row.weight -> both, axis=0"]
    check(DATA / "two_rank", wanted, aoa_config={"aoa_statements": statements})


def test_what_is_not_there() -> None:
    wanted = whole(expected("two_rank"))
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 1 is there; there are: 0"):
        check(DATA / "two_rank", wanted, unique_id=1)
    with pytest.raises(MismatchError, match="other") as caught:
        check(DATA / "two_rank", whole({"other": torch.zeros(2)}))
    assert caught.value.missing == ("other",)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "two_rank", tmp_path / "two_rank"))


def test_a_later_number_counts_unless_another_is_asked_for(copied: Path) -> None:
    shutil.copy(DATA / "flat3d" / "0.metadata", copied / "12.metadata")
    for file in DATA.joinpath("flat3d").glob("*.distcp"):
        shutil.copy(file, copied / file.name.replace("_0.", "_12."))
    data = (copied / "12.metadata").read_bytes()
    for rank in range(2):
        data = data.replace(_string(f"{rank}_0.distcp"), _string(f"{rank}_12.distcp"))
    (copied / "12.metadata").write_bytes(_without_frame(data))
    check(copied, whole(expected("flat3d")))
    wanted = whole(expected("two_rank"))
    check(copied, wanted, unique_id=0)


def test_master_weights_of_the_other_mode(copied: Path) -> None:
    for path in copied.iterdir():
        grown = path.read_bytes().replace(_string("norm.weight"), _string("opt.w_fp32_master_0"))
        path.write_bytes(_without_frame(grown))
    tensor = expected("two_rank")["norm.weight"]
    wanted = whole({"opt.master_weights.w": tensor})
    check(copied, wanted)
    with pytest.raises(MismatchError, match=r"opt\.master_weights\.w"):
        check(copied, wanted, mw_name_compatibility=False)


def _string(text: str) -> bytes:
    """A short string in a pickle."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


def _without_frame(data: bytes) -> bytes:
    """A small pickle without its one frame, whose length no longer holds."""
    return data[:2] + data[11:]


def test_damage(copied: Path) -> None:
    wanted = whole(expected("two_rank"))
    data = (copied / "1_0.distcp").read_bytes()
    for length in (0, 1, 100, len(data) // 2, len(data) - 1):
        (copied / "1_0.distcp").write_bytes(data[:length])
        with pytest.raises(CorruptCheckpointError, match=r"1_0\.distcp"):
            check(copied, wanted)
    (copied / "1_0.distcp").write_bytes(pickle.dumps([1, 2], protocol=4))
    with pytest.raises(CorruptCheckpointError, match="holds no dict"):
        check(copied, wanted)
    other = {"norm.weight": np.zeros(5, np.float32)}
    (copied / "1_0.distcp").write_bytes(pickle.dumps(other, protocol=4))
    with pytest.raises(CorruptCheckpointError, match="The metadata say"):
        check(copied, wanted)
    (copied / "1_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"1_0\.distcp: missing"):
        check(copied, wanted)
    (copied / "0.metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CorruptCheckpointError, match="not metadata of Paddle"):
        check(copied, wanted)


def test_boxes_that_leave_a_hole(copied: Path) -> None:
    """The first stored box becomes a copy of one that is nowhere."""
    data = (copied / "0.metadata").read_bytes()
    replica = _string("replica_id") + b"\x94N"
    assert data.count(replica) == 1
    # The text is there once: the other boxes refer to it by its number in the memo.
    (copied / "0.metadata").write_bytes(data.replace(replica, replica[:-1] + b"K\x01"))
    with pytest.raises(CorruptCheckpointError, match=r"do not cover each element once of col"):
        check(copied, whole(expected("two_rank")))


def arrays_in(storage: Storage, path: str) -> dict[str, tuple[int, int, str]]:
    return paddle.find_arrays(IndexBuilder(Place(storage)), path)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.dictionaries(st.text(min_size=1), st.sampled_from([0, 1, 63, 64, 70_000, 300_000])),
    protocol=st.sampled_from([3, 4]),
    dtype=st.sampled_from([np.float32, np.uint16, np.int8, np.float64]),
)
def test_arrays_are_found_in_place(sizes: dict[str, int], protocol: int, dtype: Any) -> None:
    """Also those that are longer than what is read at once, and skipped."""
    arrays = {name: np.arange(size).astype(dtype) for name, size in sizes.items()}
    data = pickle.dumps({**arrays, "StructuredToParameterName@@": {"a": "b"}}, protocol=protocol)
    storage = MemoryStorage()
    storage.put("file", data, overwrite=False)
    found = arrays_in(storage, "file")
    assert found.keys() == arrays.keys() - {"StructuredToParameterName@@"}
    for name, (position, num_bytes, kind) in found.items():
        assert kind == np.dtype(dtype).name
        stored = data[position : position + num_bytes]
        assert np.array_equal(np.frombuffer(stored, dtype), arrays[name])


def test_arrays_that_do_not_lie_row_by_row() -> None:
    storage = MemoryStorage()
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    storage.put("fortran", pickle.dumps({"w": fortran}, protocol=4), overwrite=False)
    storage.put("big", pickle.dumps({"w": np.zeros(2, ">f4")}, protocol=4), overwrite=False)
    for path in ("fortran", "big"):
        with pytest.raises(CorruptCheckpointError, match="not row-major and little-endian"):
            arrays_in(storage, path)


def test_only_what_lies_between_arrays_is_read() -> None:
    class Counting(MemoryStorage):
        num_bytes = 0

        def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
            found = super().read(path, start, stop)
            self.num_bytes += len(found)
            return found

    storage = Counting()
    arrays = {str(n): np.zeros(1 << 20, np.float32) for n in range(4)}
    storage.put("file", pickle.dumps(arrays, protocol=4), overwrite=False)
    assert len(arrays_in(storage, "file")) == 4
    assert storage.num_bytes <= 6 << 16


def test_metadata_says_what_the_data_files_hold() -> None:
    metadata = paddle.read_metadata(open_storage(DATA / "flat3d"), "0.metadata")
    first, second = metadata.state_dict_metadata["m"]
    assert (first.flattened_range, second.flattened_range) == ((0, 14), (14, 24))
    assert first.local_shape == first.global_shape == (2, 3, 4)
    assert sorted(metadata.storage_metadata.values()) == ["0_0.distcp", "1_0.distcp"]
    assert metadata.flat_mapping == {"m": ("m",)}


def test_long_texts_beside_arrays_are_read() -> None:
    array, names = np.arange(4, dtype="<f4"), {"w": "x" * 100_000}
    data = pickle.dumps({"w": array, "StructuredToParameterName@@": names}, protocol=4)
    storage = MemoryStorage()
    storage.put("file", data, overwrite=False)
    position, num_bytes, _ = arrays_in(storage, "file")["w"]
    assert data[position : position + num_bytes] == array.tobytes()


# ---------------------------------------------------------------------------------------------
# Data files of safetensors
# ---------------------------------------------------------------------------------------------


HALVES = {
    "w": torch.arange(24.0).reshape(4, 6),
    "half": torch.arange(8).to(torch.bfloat16),
    "empty": torch.zeros(0, 2),
}


def _made(kind: str, **state: object) -> Record:
    home = "paddle.distributed.flex_checkpoint.dcp.metadata"
    return Record(f"{home}.{kind}", is_new=True, state=state)


def write_halves(folder: Path, suffix: str = "distcp") -> None:
    """As Paddle leaves it with `safetensors=True`: each of two ranks has half of each tensor."""
    boxes: dict[str, list[Record]] = {name: [] for name in HALVES}
    places: dict[Record, str] = {}
    for rank in range(2):
        own = {name: tensor.chunk(2)[rank] for name, tensor in HALVES.items() if len(tensor)}
        own |= {} if rank else {"empty": HALVES["empty"]}
        save_file(own, folder / f"{rank}_0.{suffix}")
        for name, part in own.items():
            corner = (rank * len(part), *(0,) * (part.ndim - 1))
            shapes = {"local_shape": tuple(part.shape), "global_shape": tuple(HALVES[name].shape)}
            box = {"global_offset": corner, "dtype": str(part.dtype).removeprefix("torch.")}
            boxes[name].append(_made("LocalTensorMetadata", **box, **shapes))
            index = {"tensor_key": name, "global_offset": corner}
            found = _made("LocalTensorIndex", **index, local_shape=tuple(part.shape))
            places[found] = f"{rank}_0.{suffix}"
    state = {"state_dict_metadata": boxes, "storage_metadata": places, "flat_mapping": {}}
    (folder / "0.metadata").write_bytes(dumps(_made("Metadata", **state)))


@pytest.mark.parametrize("suffix", ["distcp", "safetensors"])
def test_data_files_of_safetensors(suffix: str, tmp_path: Path) -> None:
    write_halves(tmp_path, suffix)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert checkpoint.format == "paddle"
    assert set(checkpoint) == HALVES.keys()
    for name, tensor in HALVES.items():
        assert torch.equal(checkpoint[name], tensor)


@pytest.mark.parametrize("other", ["0_1.safetensors", "weights.safetensors"])
def test_a_file_of_safetensors_that_is_not_of_the_checkpoint(other: str, tmp_path: Path) -> None:
    write_halves(tmp_path, "safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / other)
    with pytest.raises(StateError, match="Say which to read, safetensors or paddle"):
        remesh.Checkpoint(tmp_path)


def test_elements_of_another_type_than_the_metadata_say(tmp_path: Path) -> None:
    """Of the same size, so that nothing else would tell."""
    write_halves(tmp_path)
    save_file(
        {name: torch.ones(2, 6, dtype=torch.int32) for name in HALVES}, tmp_path / "1_0.distcp"
    )
    with pytest.raises(CorruptCheckpointError, match="w: 48 bytes of int32 are stored"):
        remesh.Checkpoint(tmp_path)
