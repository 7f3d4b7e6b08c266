"""What `format="paddle_safetensors"` writes, read by a reader of Paddle's own specification.

It stands in for Paddle's loader: the metadata is unpickled into classes with Paddle's fields, each
file is a safetensors file whatever it is called, and a box is looked up by its `LocalTensorIndex`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import remesh
from remesh.errors import CorruptCheckpointError, StateError
from remesh.exchange import Exchange
from remesh.formats import paddle
from tests.support import run_ranks

WHOLE = {
    "linear.weight": torch.arange(24.0).reshape(4, 6),
    "linear.weight.moment1_0": torch.arange(24.0).reshape(4, 6) / 7,
    "half": torch.arange(8).to(torch.bfloat16),
    "step": torch.tensor(3),
    "empty": torch.zeros(0, 2),
}


def state_of(rank: int) -> dict[str, Any]:
    """Rows of a weight, two blocks a rank of its moment, the rest on every rank."""
    moment = WHOLE["linear.weight.moment1_0"]
    parts = [(0, 3 * rank), (2, 3 - 3 * rank)]
    blocks = [
        remesh.sharding.Part(
            remesh.sharding.Box(corner, (2, 3)),
            moment[corner[0] : corner[0] + 2, corner[1] : corner[1] + 3].contiguous(),
        )
        for corner in parts
    ]
    name = "linear.weight.moment1_0"
    rows = WHOLE["linear.weight"][2 * rank : 2 * rank + 2]
    return {
        "linear.weight": remesh.ShardedTensor.at_offset(
            "linear.weight", rows, (4, 6), (2 * rank, 0)
        ),
        name: remesh.ShardedTensor(name, (4, 6), tuple(blocks)),
        **{key: WHOLE[key] for key in ("half", "step", "empty")},
    }


class Fields:
    """A class of Paddle's metadata, hashed and compared by its fields."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return hash(tuple(sorted(map(str, self.__dict__.items()))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fields) and self.__dict__ == other.__dict__


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        assert module == "paddle.distributed.flex_checkpoint.dcp.metadata"
        assert name in {"Metadata", "LocalTensorMetadata", "LocalTensorIndex"}
        return type(name, (Fields,), {})


def read_by_specification(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor, put together."""
    with (folder / "0.metadata").open("rb") as file:
        metadata: Any = Unpickler(file).load()
    found = {}
    for name, boxes in metadata.state_dict_metadata.items():
        (shape,), (dtype,) = {box.global_shape for box in boxes}, {box.dtype for box in boxes}
        whole, count = torch.zeros(shape, dtype=getattr(torch, dtype)), torch.zeros(shape)
        held = {(box.global_offset, box.local_shape) for box in boxes}
        for index, path in metadata.storage_metadata.items():
            if index.tensor_key != name:
                continue
            assert (index.global_offset, index.local_shape) in held
            assert not index.is_flattened
            assert index.replica_id is None
            assert path.endswith("_0.distcp")
            corner = zip(index.global_offset, index.local_shape, strict=True)
            place = tuple(slice(start, start + extent) for start, extent in corner)
            whole[place] = load_file(folder / path)[name]
            count[place] += 1
        assert (count == 1).all()
        assert metadata.flat_mapping[name] == (name,)
        found[name] = whole
    return found


@pytest.mark.parametrize("in_background", [False, True])
def test_what_ranks_write_is_what_paddle_reads(in_background: bool, tmp_path: Path) -> None:
    def save(exchange: Exchange) -> None:
        state = state_of(exchange.rank)
        if in_background:
            with remesh.Saver(group=exchange, format="paddle_safetensors") as saver:
                saver.save_async(state, tmp_path).result()
        else:
            remesh.save(state, tmp_path, format="paddle_safetensors", group=exchange)

    run_ranks(2, save)
    found = read_by_specification(tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert checkpoint.format == "paddle"
    assert found.keys() == WHOLE.keys() == set(checkpoint)
    for name, tensor in WHOLE.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(checkpoint[name], tensor)


def test_data_files_may_be_called_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "0_0.safetensors"
    monkeypatch.setattr(paddle, "_file_name", lambda _rank, _turn: name)
    remesh.save({"w": torch.arange(3)}, tmp_path, format="paddle_safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"0.metadata", name}
    checkpoint = remesh.Checkpoint(tmp_path)
    assert checkpoint.format == "paddle"
    assert checkpoint["w"].tolist() == [0, 1, 2]
    # One that is not of the checkpoint is another one.
    for other in ("0_1.safetensors", "weights.safetensors"):
        save_file({"w": torch.ones(2)}, tmp_path / other)
        with pytest.raises(StateError, match="Say which to read, safetensors or paddle"):
            remesh.Checkpoint(tmp_path)
        (tmp_path / other).unlink()


def test_elements_of_another_type_than_the_metadata_say(tmp_path: Path) -> None:
    """Of the same size, so that nothing else would tell."""
    remesh.save({"w": torch.arange(3)}, tmp_path, format="paddle_safetensors")
    save_file({"w": torch.ones(3, dtype=torch.float64)}, tmp_path / "0_0.distcp")
    with pytest.raises(CorruptCheckpointError, match="w: 24 bytes of float64 are stored"):
        remesh.Checkpoint(tmp_path)
