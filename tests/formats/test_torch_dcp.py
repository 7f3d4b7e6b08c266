"""Checkpoints of torch.distributed.checkpoint in one process, read in place and written."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import remesh
from remesh.core.dtypes import DTYPES
from remesh.formats.archive import ArchiveLayout, scan_head, tensor_record
from remesh.formats.pickle_writer import dumps
from tests.engine.bits import bits_of, random_tensor

# torch says so whenever it saves without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def dcp_save(state: dict[str, Any], folder: Path, **options: Any) -> None:
    dcp.state_dict_saver.save(state, storage_writer=FileSystemWriter(folder, **options))


def random_tensors(*, opaque: bool) -> dict[str, torch.Tensor]:
    """One of each element type; torch saves some of those that it does not copy, and loads none."""
    names = [dtype.name for dtype in DTYPES if dtype.is_opaque == opaque]
    return {name: random_tensor(getattr(torch, name), (2, 3)) for name in names}


def make_state() -> dict[str, Any]:
    return {
        "model": {
            **random_tensors(opaque=False),
            "transposed": torch.arange(12.0).reshape(3, 4).t(),
            "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
            "channels_last": torch.arange(48.0)
            .reshape(1, 3, 4, 4)
            .contiguous(memory_format=torch.channels_last),
            "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3),
        },
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2, "names": ["a", "b"]}],
        "step": 7,
        "config": {"name": "run", "dtype": torch.bfloat16, "nothing": None},
    }


def flat_bits(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return bits_of(state)
    if isinstance(state, dict):
        return {key: flat_bits(item) for key, item in state.items()}
    return [flat_bits(item) for item in state] if isinstance(state, list) else state


def test_everything_that_torch_saves_comes_back(tmp_path: Path) -> None:
    dcp_save(make_state(), tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert checkpoint.format == "torch_dcp"
    assert flat_bits(checkpoint.state()) == flat_bits(make_state())
    assert checkpoint.index["model.transposed"].num_pieces == 3


def test_numbers_as_keys_are_numbers_where_the_state_has_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch stores their texts, and a schedule whose milestones are texts never gets there."""

    def state(names: dict[Any, str]) -> dict[str, Any]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [len(names), 2, 40])
        return {"schedule": schedule, "names": names, "milestones": schedule.milestones}

    source = state({-1: "a", 10: "b"})
    dcp.save(source, checkpoint_id=tmp_path, no_dist=True)
    target = state({10: "", 3: "", 4: ""})
    remesh.load(target, tmp_path)
    assert target["names"] == source["names"]
    assert target["milestones"] == source["milestones"] == {2: 2, 40: 1}
    assert target["schedule"].state_dict() == source["schedule"].state_dict()
    assert "names.3, names.4" in caplog.text
    others = {"mixed": {0: 1, "x": 2}, "pairs": {(1, 2): 3}, "flags": {True: 4}}
    dcp.save(others, checkpoint_id=tmp_path / "o", no_dist=True)
    found = {"mixed": {0: 0, "x": 0}, "pairs": {(1, 2): 0}, "flags": {True: 0}}
    remesh.load(found, tmp_path / "o")
    assert found == others


def test_empty_dicts_are_values(tmp_path: Path) -> None:
    """torch leaves them out, and a loader that asks for one would miss it."""
    state = {"scaler": {}, "items": [{}, {"a": 1}], "w": torch.ones(2)}
    remesh.save(state, tmp_path, format="torch_dcp")
    target: dict[str, Any] = {"scaler": {"old": 1}, "items": [], "w": torch.zeros(2)}
    remesh.load(target, tmp_path, unexpected="error")
    assert str(target) == str(state)
    dcp.load(found := {"w": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["w"], torch.ones(2))


def test_elements_without_their_sign_are_refused_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2, dtype=torch.complex64).conj()}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(
        remesh.errors.FormatVersionError, match=r"w: .* without their sign \(conj\)"
    ):
        remesh.Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["torch_dcp", "torch_dist", "torch_file"])
def test_values_beside_tensors_keep_their_places_in_lists(name: str, tmp_path: Path) -> None:
    def state(number: int, text: str) -> dict[str, Any]:
        inner: list[Any] = [text, torch.full((2,), number), number]
        return {"inner": inner, "outer": [number, {"inner": (inner[1] + 1, [number, text])}]}

    remesh.save(state(3, "a"), tmp_path, format=name)
    target = state(0, "")
    remesh.load(target, tmp_path, unexpected="error")
    assert str(target) == str(state(3, "a"))


def test_types_that_torch_does_not_copy_are_stored_as_what_they_are(tmp_path: Path) -> None:
    state = random_tensors(opaque=True)
    remesh.save(state, tmp_path / "saved", format="torch_dcp")
    assert flat_bits(remesh.Checkpoint(tmp_path / "saved").state()) == flat_bits(state)
    metadata = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    stated = {
        name: str(entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert stated == {name: f"torch.{name}" for name in state}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_everything_that_is_saved_comes_back_by_torch(tmp_path: Path) -> None:
    remesh.save(make_state(), tmp_path / "saved", format="torch_dcp")
    target = make_state()
    for tensor in target["model"].values():
        tensor.untyped_storage().fill_(1)
    target["step"], target["config"]["name"] = 0, ""
    dcp.state_dict_loader.load(target, checkpoint_id=tmp_path / "saved")
    assert flat_bits(target) == flat_bits(make_state())

    dcp_to_torch_save(tmp_path / "saved", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert flat_bits(whole) == flat_bits(make_state())
    assert flat_bits(remesh.Checkpoint(tmp_path / "saved").state()) == flat_bits(make_state())


def test_the_safetensors_variant(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    dcp_save({**state, "step": 3}, tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert flat_bits(checkpoint.state()) == flat_bits({**state, "step": 3})


def write_flattened(folder: Path) -> np.ndarray[Any, Any]:
    """What Megatron 0.15 wrote of flattened optimizer state: (4, 6) over a 2 x 1 grid."""
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    chunks, places, data = [], {}, b""
    for row, start, stop in ((0, 0, 5), (0, 5, 12), (1, 0, 12)):
        local = whole[2 * row : 2 * row + 2].reshape(-1)[start:stop]
        box = ChunkStorageMetadata(torch.Size((row, 0, start)), torch.Size((1, 1, stop - start)))
        path = folder / "piece"
        torch.save(torch.from_numpy(local.copy()).view(1, 1, -1), path)
        archive = path.read_bytes()
        index = MetadataIndex("moment", box.offsets)
        places[index] = dcp.filesystem._StorageInfo("__0_0.distcp", len(data), len(archive))
        chunks.append(box)
        data += archive
    path.unlink()
    (folder / "__0_0.distcp").write_bytes(data)
    entry = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size((2, 1, 12)), chunks
    )
    metadata = Metadata({"moment": entry}, storage_data=places)
    metadata.mcore_data = {  # type: ignore[attr-defined]
        "moment": {"nd_reformulated_orig_global_shape": (4, 6)}
    }
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return whole


def test_flattened_tensors_have_their_true_shape(tmp_path: Path) -> None:
    whole = write_flattened(tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert checkpoint.index["moment"].shape == (4, 6)
    np.testing.assert_array_equal(checkpoint.read_array("moment"), whole)
    box = remesh.sharding.Box((1, 2), (2, 3))
    np.testing.assert_array_equal(checkpoint.read_array("moment", box), whole[1:3, 2:5])


# ---------------------------------------------------------------------------------------------
# What is damaged or unclear
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    dcp_save({"w": torch.arange(1000.0), "step": 7}, tmp_path)
    return tmp_path


def cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


class Custom:
    """A class that no checkpoint may name unasked."""

    def __init__(self) -> None:
        self.lr = 0.1


def test_a_refused_value_is_an_error_for_who_asks_for_it(tmp_path: Path) -> None:
    dcp_save({"w": torch.ones(2), "custom": Custom(), "step": 1}, tmp_path)
    state: dict[str, Any] = {"w": torch.zeros(2), "step": 0}
    remesh.load(state, tmp_path)
    assert (state["w"].tolist(), state["step"]) == ([1, 1], 1)
    allow = r"load it with allow=\['.*Custom'\]"
    with pytest.raises(remesh.MismatchError, match=allow):
        remesh.load({"custom": None}, tmp_path)


def test_compressed_checkpoints_are_refused(saved: Path) -> None:
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd/1"]
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(remesh.errors.FormatVersionError, match="zstd"):
        remesh.Checkpoint(saved)


def test_two_formats_in_one_directory(
    saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    native = tmp_path_factory.mktemp("native")
    remesh.save({"step": 1}, native)
    shutil.copytree(native, saved, dirs_exist_ok=True)
    with pytest.raises(remesh.errors.StateError, match="Say which"):
        remesh.Checkpoint(saved)
    # A format that is written under several names is read under each of them.
    for name, step in [("remesh", 1), ("torch_dcp", 7), ("torch_dist", 7)]:
        assert remesh.Checkpoint(saved, format=name).values == {"step": step}
        state = {"step": 0}
        remesh.load(state, saved, format=name)
        assert state == {"step": step}
    with pytest.raises(remesh.errors.StateError, match="known are"):
        remesh.load({"step": 0}, saved, format="nonsense")


def test_verify_says_that_there_are_no_digests(saved: Path) -> None:
    checkpoint = remesh.Checkpoint(saved)
    report = checkpoint.verify()
    assert (report.ok, report.has_digests) == (True, False)
    cut(saved / "__0_0.distcp", 5000)
    assert [damage.tensors for damage in checkpoint.verify().damages] == [("w",)]
    with pytest.raises(remesh.errors.StateError, match="no commit record"):
        _ = checkpoint.record


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def test_tensors_with_a_prefix_lie_in_files_of_their_own(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.arange(3.0)},
        "optimizer": {"m": torch.ones(4), "v": torch.ones(2)},
    }
    hint = {"separation_hint": "optimizer."}
    remesh.save(state, tmp_path, format="torch_dcp", format_options=hint)
    index = remesh.Checkpoint(tmp_path).index
    apart = {piece.path for name in index for piece in index.pieces(name) if name != "model.w"}
    assert apart == {path.name for path in tmp_path.glob("optimizer.*")}
    assert len(apart) == 1
    target = {"model": {"w": torch.zeros(3)}, "optimizer": {"m": torch.zeros(4)}}
    dcp.state_dict_loader.load(target, checkpoint_id=tmp_path)
    assert target["model"]["w"].tolist() == [0, 1, 2]
    assert target["optimizer"]["m"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "shapes",
    [{"moment": (5, 5)}, {"moment": (4, 6, 1)}, {"absent": (4, 6)}, {"moment": (4, 6)}],
    ids=["grid", "dims", "absent", "not ranges"],
)
def test_flattened_shapes_that_do_not_fit_are_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    state = {"moment": torch.arange(24.0).reshape(2, 1, 12)}
    with pytest.raises(remesh.errors.StateError, match="is no flattened form"):
        remesh.save(state, tmp_path, format="torch_dcp", format_options={"flat_shapes": shapes})
    assert not list(tmp_path.iterdir())


def test_an_archive_beyond_four_gigabytes(tmp_path: Path) -> None:
    num_bytes = (1 << 32) + 12
    dtype = next(dtype for dtype in DTYPES if dtype.name == "uint8")
    pickled = dumps(tensor_record(dtype, (num_bytes,), "0"))
    (_, head), (_, tail) = ArchiveLayout(pickled, [num_bytes]).literals
    path = tmp_path / "large.pt"
    with path.open("wb") as file:  # sparse: only the ends take room
        file.write(head)
        file.seek(len(head) + num_bytes - 1)
        file.write(b"\x07" + tail)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert (tensor.shape, tensor[-1].item()) == ((num_bytes,), 7)
    assert scan_head(head) == (pickled, len(head))
    last = remesh.sharding.Box((num_bytes - 1,), (1,))
    assert remesh.Checkpoint(path).read_array("value", last).tolist() == [7]
