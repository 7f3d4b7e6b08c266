"""What fuzzing has found, case by case: damage that once ended in an error that is not remesh's.

Each case says which checkpoint it damages and how, and what the error must say. None of them may
take memory or time that its size does not account for.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import remesh
from remesh.core.index import Index, StoredFile
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import CheckpointError, CoverageError
from tests.fuzz.checkpoints import make_checkpoint
from tests.fuzz.files import Files, in_memory
from tests.fuzz.mutations import forge, record_file
from tests.fuzz.trial import attempt, import_late_modules, sound_state
from tests.stored_index import packed_columns, plain_columns

pytestmark = pytest.mark.usefixtures("late_modules")

Damage = Callable[[Files], None]


@pytest.fixture(scope="module")
def late_modules() -> None:
    import_late_modules()
    for name in sorted({name for name, _, _ in CASES.values()}):
        sound_state(make_checkpoint(name))


DEEP = b"[" * 100_000 + b"]" * 100_000


def edited(end: str, change: Callable[[bytes], bytes], forged: int | None = None) -> Damage:
    """Other content in the file whose path ends so, and, if asked for, the digests of that."""

    def damage(files: Files) -> None:
        path = next(path for path in files if path.endswith(end))
        files[path] = change(files[path])
        if forged is not None:
            forge(files, random.Random(forged))

    return damage


def in_json(path: str, **fields: Any) -> Damage:
    """Other fields in a JSON file."""
    return edited(path, lambda old: json.dumps(json.loads(old) | fields).encode())


def instead(path: str, content: bytes) -> Damage:
    """Another file, or one more."""
    return lambda files: files.update({path: content})


def in_slice(**fields: Any) -> Damage:
    """Other fields in what ATorch's meta file says of a parameter."""

    def change(old: bytes) -> bytes:
        document = json.loads(old)
        document["param_meta"]["w"] |= fields
        return json.dumps(document).encode()

    return edited("flat_meta.00000-00001", change)


def in_metadata(change: Callable[[Any], object]) -> Damage:
    """Other objects in the metadata of torch.distributed.checkpoint."""

    def changed(old: bytes) -> bytes:
        change(metadata := pickle.loads(old))
        return pickle.dumps(metadata)

    return edited(".metadata", changed)


def instead_of_archive(end: str, content: Any) -> Damage:
    """Another archive of torch.save."""
    torch.save(content, made := io.BytesIO())
    return edited(end, lambda _old: made.getvalue())


def in_values(change: Callable[[Any], object]) -> Damage:
    """Another document of values in a checkpoint of remesh."""

    def changed(old: bytes) -> bytes:
        change(document := msgspec.msgpack.decode(old))
        return msgspec.msgpack.encode(document)

    return edited("values.msgpack", changed, forged=1)


def in_index(change: Callable[[dict[str, Any], dict[str, str]], object]) -> Damage:
    """Other columns in the index of a checkpoint of remesh."""

    def changed(old: bytes) -> bytes:
        columns, metadata = plain_columns(old)
        change(columns, metadata)
        return packed_columns(columns, metadata)

    return edited("index.safetensors", changed, forged=2)  # these dice leave digests of blocks


def _set_shape(columns: dict[str, Any], row: int, shape: list[int]) -> None:
    """Give all tensors more dims, and one of them, which has no pieces, this shape."""
    num_dims = len(shape)
    for name, fill in (("tensor.shape", 1), ("piece.shape", 1), ("piece.offset", 0)):
        column = columns[name]
        missing = max(num_dims - column.shape[1], 0)
        columns[name] = np.pad(column, ((0, 0), (0, missing)), constant_values=fill)
    columns["tensor.shape"][row, :num_dims] = shape
    columns["tensor.ndim"][row] = num_dims


def _claim_size(_columns: dict[str, Any], metadata: dict[str, str]) -> None:
    files = json.loads(metadata["remesh.files"])
    files[0][1] = 1 << 61
    metadata |= {"remesh.files": json.dumps(files), "remesh.block_size": "0"}


CASES: dict[str, tuple[str, Damage, str]] = {
    "zarr: a description nested without end": (
        "zarr by zarr", instead("a/.zarray", b'{"x":' + DEEP + b"}"), r"a/\.zarray"),
    "zarr: a configuration nested without end": (
        "zarr by zarr", instead("metadata.json", b'{"x":' + DEEP + b"}"), "no checkpoint|not a"),
    "zarr: 10^12 chunks": (
        "zarr by zarr", in_json("a/.zarray", shape=[10**12], chunks=[1]), "more than there are"),
    "zarr: a hundred dims": (
        "zarr by zarr", in_json("a/.zarray", shape=[1] * 100, chunks=[1] * 100), "100 dims"),
    "zarr: more elements than numbers have": (
        "zarr by zarr", in_json("a/.zarray", shape=[0, 1 << 62, 1 << 62], chunks=[1, 1, 1]),
        "too large"),
    "zarr: a separator that joins two chunks' names": (
        "zarr by zarr", in_json("a/.zarray", dimension_separator=""), r"a/\.zarray"),
    "atorch: a world of 999999999 ranks": (
        "atorch by remesh", instead("flat_param.00000-999999999", b""), "ranks"),
    "atorch: a meta file nested without end": (
        "atorch by remesh", instead("flat_meta.00000-00001", DEEP), r"flat_meta\.00000-00001"),
    "atorch: negative extents whose product is right": (
        "atorch by remesh", in_slice(param_shapes=[-2, -3]), "not a shape"),
    "atorch: an extent that is infinite": (
        "atorch by remesh", in_slice(param_shapes=[float("1e999")]), "not"),
    "atorch: an extent of 5000 digits": (
        "atorch by remesh", in_slice(param_shapes=["9" * 5000]), "not a shape"),
    "atorch: a range of one number": (
        "atorch by remesh", in_slice(param_offsets=[0]), "not the range"),
    "atorch: a unit that is a list": (
        "atorch by remesh", in_slice(striped_fsdp_name=[1]), "not a name"),
    "atorch: parameters that are a number": (
        "atorch by remesh", instead("optim_meta", b'[{"params": 0.5}]'), "optim_meta"),
    "dcp: chunks that are no chunks": (
        "torch_dcp", in_metadata(lambda m: setattr(m.state_dict_metadata["b"], "chunks", [3])),
        "not the chunks"),
    "dcp: chunks that are a number": (
        "torch_dcp", in_metadata(lambda m: setattr(m.state_dict_metadata["b"], "chunks", 3)),
        "not the chunks"),
    "dcp: a chunk of other dims": (
        "torch_dcp", in_metadata(lambda m: setattr(m.state_dict_metadata["b"], "chunks", [
            ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, 3)))])), "a chunk at"),
    "dcp: extents of 2^70": (
        "torch_dcp", in_metadata(lambda m: setattr(m.state_dict_metadata["b"], "size", (2**70,))),
        "not a shape"),
    "dcp: a path of no keys": (
        "torch_dcp", in_metadata(lambda m: m.planner_data.update(b=())), "not a path"),
    "dcp: a path that is a number": (
        "torch_dcp", in_metadata(lambda m: m.planner_data.update(b=5)), "not a path"),
    "dcp: a path of half numbers": (
        "torch_dcp", in_metadata(lambda m: m.planner_data.update(b=(0.5,))), "not a name"),
    "dcp: a range that leaves a flattened tensor": (
        "megatron flattened", in_metadata(lambda m: m.mcore_data.update(
            moment={"nd_reformulated_orig_global_shape": (2**62, 6)})), "does not fit"),
    "dcp: the true shape of a flattened tensor is a number": (
        "megatron flattened", in_metadata(lambda m: m.mcore_data.update(
            moment={"nd_reformulated_orig_global_shape": 5})), "not a shape"),
    "deepspeed: a buffer whose name is a list": (
        "deepspeed universal", instead_of_archive(
            "mp_rank_00_model_states.pt", {"buffer_names": [["x"]]}), "not a name"),
    "deepspeed: the states of no groups": (
        "deepspeed zero 2", instead_of_archive("optim_states.pt", {"optimizer_state_dict": {
            "single_partition_of_fp32_groups": [torch.ones(1 << 12)], "base_optimizer_state": ()}}),
        "the state of 0 of 1 groups"),
    "native: a list whose items have names": (
        "native", in_values(lambda d: d["sequences"].append([["nested"], "list"])), "called"),
    "native: a container of an unknown kind": (
        "native", in_values(lambda d: d["sequences"].append([["nested"], "heap"])), "heap"),
    "native: a path of no keys": (
        "native", in_values(lambda d: d["paths"].update(iteration=[])), "a path of"),
    "native: a path of a million keys": (
        "native", in_values(lambda d: d["paths"].update(iteration=[0] * 10**6)), "a path of"),
    "native: a tensor without bytes of 10^12 elements": (
        "native", in_values(lambda d: d["values"].update(
            iteration={"$": "torch.Tensor", "v": ["float32", [10**12], b""]})), "cannot be"),
    "native: attributes whose names are numbers": (
        "native", in_values(lambda d: d["values"].update(iteration={
            "$": "argparse.Namespace", "v": {"$": "dict", "v": [[1, 2]]}})), "cannot be"),
    "native: a hundred dims": (
        "native", in_index(lambda c, _: _set_shape(c, 3, [1] * 99 + [0])), "dims"),
    "native: more elements than numbers have": (
        "native", in_index(lambda c, _: _set_shape(c, 3, [0, 1 << 61, 1 << 61])), "too large"),
    "native: a file that is said to have 2^61 bytes": ("native", in_index(_claim_size), "disagree"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_an_error_of_remesh(case: str) -> None:
    name, damage, message = CASES[case]
    files = make_checkpoint(name)
    damage(files)

    def read() -> None:
        checkpoint = remesh.Checkpoint(in_memory(files))
        checkpoint.verify()
        checkpoint.state()

    with pytest.raises(remesh.RemeshError, match=message) as caught:
        read()

    assert isinstance(caught.value, CheckpointError | remesh.errors.StateError)
    attempt(files, {}, by_command=False)
    attempt(files, {}, by_command=True)


@pytest.mark.parametrize(
    "name", ["#bytes-00", "#bytes-", "#bytes-xy", "x#0+1=1:fill", "#0+0=9:fill-zz"]
)
def test_an_index_that_names_a_file_that_is_not_stored(name: str) -> None:
    files = make_checkpoint("native")

    def rename(_columns: dict[str, Any], metadata: dict[str, str]) -> None:
        stored = json.loads(metadata["remesh.files"])
        stored[0][0] = name
        metadata["remesh.files"] = json.dumps(stored)

    in_index(rename)(files)
    record = json.loads(files["remesh.json"])["record"]
    record["files"][0]["path"] = name
    files["remesh.json"] = record_file(json.dumps(record).encode())

    with pytest.raises(CheckpointError):
        remesh.Checkpoint(in_memory(files)).state()
    attempt(files, {}, by_command=False)


def test_a_name_with_many_dots_takes_no_time_or_memory() -> None:
    files = make_checkpoint("native")
    name = "a." * 30_000 + "a"
    in_values(lambda document: document["values"].update({name: 5}))(files)

    assert remesh.Checkpoint(in_memory(files)).values[name] == 5
    attempt(files, {}, by_command=False)


def test_pieces_that_share_their_bytes_too_often() -> None:
    num_pieces = 5000
    tensors = TensorTable.of([("w", "uint8", (num_pieces, 100))])
    boxes = BoxTable.of(
        tensors, [(0, remesh.sharding.Box((row, 0), (1, 100))) for row in range(num_pieces)]
    )
    nowhere = np.zeros(num_pieces, np.int64)
    index = Index.of(boxes, nowhere, nowhere, (StoredFile("data", 100),))

    with pytest.raises(remesh.CorruptCheckpointError, match="share their bytes"):
        Index.decode(index.encode(), "index")


def longer(size: int) -> Damage:
    """A hole: what is said to be stored is less than all of it."""
    return in_metadata(lambda m: setattr(m.state_dict_metadata["b"], "size", torch.Size((size,))))


def overlapping(metadata: Any) -> None:
    """Four elements in two boxes of three."""
    entry, places = metadata.state_dict_metadata["b"], metadata.storage_data
    [first] = [one for one in places if one.fqn == "b"]
    second = dataclasses.replace(first, offset=torch.Size((1,)), index=1)
    places[second] = places[first]
    entry.size = torch.Size((4,))
    entry.chunks.append(ChunkStorageMetadata(second.offset, torch.Size((3,))))


@pytest.mark.parametrize("damage", [longer(8), in_metadata(overlapping)], ids=["hole", "overlap"])
def test_a_checkpoint_that_does_not_hold_every_element_once_does_not_verify(damage: Damage) -> None:
    files = make_checkpoint("torch_dcp")
    assert remesh.Checkpoint(in_memory(files)).verify().ok
    damage(files)
    checkpoint = remesh.Checkpoint(in_memory(files))
    report = checkpoint.verify()
    assert not report.ok
    assert (report.incomplete, report.damages) == (("b",), ())
    with pytest.raises(CoverageError):
        checkpoint.read("b")


def test_a_hole_takes_no_memory() -> None:
    files = make_checkpoint("torch_dcp")
    longer(10**12)(files)
    checkpoint = remesh.Checkpoint(in_memory(files))
    with pytest.raises(CoverageError):
        checkpoint.read("b")
    with pytest.raises(CoverageError):
        checkpoint.state()
