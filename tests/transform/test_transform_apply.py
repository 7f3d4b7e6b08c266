"""Dictionaries of arrays of all kinds, and descriptions of sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import remesh
from remesh import ShardedTensor, Transform
from remesh.core.geometry import Box
from remesh.core.tables import BoxTable, TensorTable
from remesh.errors import TransformError, UnsupportedValueError
from remesh.transform import TensorInfo, infos_of_boxes
from remesh.transform.tensor_info import infos_of
from tests.support import run_ranks

FUSE = Transform("a^T, b -> c, axis=0")


def test_numpy_and_torch_may_be_mixed() -> None:
    a, b = np.arange(6.0).reshape(2, 3), torch.arange(4.0, dtype=torch.float64).reshape(2, 2)
    expected = np.concatenate([a.T, b.numpy()])
    target = np.empty((5, 2))
    assert np.array_equal(FUSE.apply({"a": a, "b": b}, {"c": target})["c"], expected)
    assert np.array_equal(target, expected)
    tensor = torch.empty(5, 2, dtype=torch.float64)
    FUSE.apply({"a": a, "b": b.numpy()}, {"c": tensor})
    assert np.array_equal(tensor.numpy(), expected)
    assert isinstance(FUSE.apply({"a": a, "b": b})["c"], torch.Tensor)


def test_arrays_of_any_strides_and_read_only_ones() -> None:
    a = np.arange(12.0).reshape(4, 3)[::-2]
    a.flags.writeable = False
    b = np.broadcast_to(np.float64(7), (2, 2))
    expected = np.concatenate([a.T, b])
    assert np.array_equal(FUSE.apply({"a": a, "b": b})["c"], expected)
    target = torch.empty(2, 5, dtype=torch.float64).T
    FUSE.apply({"a": a, "b": b}, {"c": target})
    assert np.array_equal(target.numpy(), expected)


def test_parameters_are_filled_in_place() -> None:
    layer = torch.nn.Linear(3, 2)
    weight = torch.arange(6.0).reshape(3, 2)
    targets = dict(layer.named_parameters())
    Transform("w^T -> weight   b -> bias").apply({"w": weight, "b": torch.ones(2)}, targets)
    assert torch.equal(layer.weight, weight.T)
    assert layer.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_all_dtypes_can_be_moved(dtype: torch.dtype) -> None:
    a = torch.arange(6).reshape(2, 3).to(dtype)
    result = Transform("a^T -> b   b, b -> c, tie").apply({"a": a})["c"]
    assert result.dtype == dtype
    assert torch.equal(result.to(torch.complex64), a.T.to(torch.complex64))


def test_numpy_has_no_bfloat16() -> None:
    result = Transform("a -> b, dtype=bfloat16").apply({"a": np.ones(2, np.float32)})
    assert torch.equal(result["b"], torch.ones(2, dtype=torch.bfloat16))


def test_a_conversion_that_overflows_is_infinite() -> None:
    result = Transform("a -> b, dtype=float16").apply({"a": np.float32([1e6])})  # type: ignore[arg-type]
    assert result["b"].tolist() == [np.inf]


def test_an_array_of_text_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="a: element type"):
        Transform("a -> b").apply({"a": np.array(["text"])})


def test_nothing_is_written_if_anything_is_wrong() -> None:
    targets = {"x": np.full(2, 9.0), "y": np.full(2, 9.0)}
    sources = {"a": np.zeros(2), "b": np.zeros(2), "c": np.ones(2)}
    with pytest.raises(TransformError):
        Transform("a -> x   b, c -> y, tie").apply(sources, targets)
    assert targets["x"].tolist() == targets["y"].tolist() == [9, 9]


def test_overlapping_memory_is_copied_first() -> None:
    memory = np.arange(8.0)
    Transform("a -> b   b -> t   a -> b   old -> a").apply(
        {"a": memory[:4], "b": memory[4:], "old": memory[2:6]}, {"a": memory[:4], "b": memory[4:]}
    )
    assert memory.tolist() == [2, 3, 4, 5, 0, 1, 2, 3]


def test_regions_refuse_boxes_outside() -> None:
    resolved = FUSE.resolve({"a": TensorInfo("int8", (2, 3)), "b": TensorInfo("int8", (2, 2))})
    for box in (Box((0, 0), (6, 2)), Box((4, 1), (1, 2)), Box((0,), (1,))):
        with pytest.raises(ValueError, match="does not lie in shape"):
            resolved.regions("c", box)
    with pytest.raises(KeyError):
        resolved.regions("nothing")
    assert resolved.regions("c", Box((2, 1), (0, 1))) == ()


def test_pieces_are_counted_axis_by_axis() -> None:
    tensors = TensorTable.of([("a", "int8", (4, 6)), ("b", "int8", (5,)), ("c", "int8", ())])
    grid = [Box((row, column), (2, 2)) for row in (0, 2) for column in (0, 2, 4)]
    rows = [
        *((0, box) for box in grid),
        (1, Box((0,), (2,))),
        (1, Box((2,), (3,))),
        (2, Box((), ())),
    ]
    boxes = BoxTable.of(tensors, rows)
    infos = infos_of_boxes(tensors, boxes.tensor, boxes.offsets)
    assert [info.num_pieces for info in infos] == [(2, 3), (2,), ()]


def test_an_index_says_how_its_tensors_are_cut(tmp_path: Path) -> None:
    """Two ranks save gate and up as one tensor of their own; the layout is known from the file."""
    gate, up = np.arange(8.0).reshape(2, 4), 100 + np.arange(8.0).reshape(2, 4)

    def save(exchange: remesh.exchange.Exchange) -> None:
        rows = slice(2 * exchange.rank, 2 * exchange.rank + 2)
        part = np.concatenate([gate[:, rows], up[:, rows]], axis=1)
        shard = ShardedTensor.from_rank_offsets("w", part, (1, exchange.rank, 2))
        remesh.save({"w": shard}, tmp_path / "checkpoint", group=exchange)

    run_ranks(2, save)
    checkpoint = remesh.Checkpoint(tmp_path / "checkpoint")
    assert infos_of(checkpoint.index) == {"w": TensorInfo("float64", (2, 8), (1, 2))}
    resolved = Transform("w -> gate, up, fused_ffn").resolve(checkpoint.index)
    assert resolved.targets["gate"] == TensorInfo("float64", (2, 4))
    regions = resolved.regions("up")
    assert [region.source_box for region in regions] == [Box((0, 2), (2, 2)), Box((0, 6), (2, 2))]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_device() -> None:
    a = torch.randn(64, 32, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(16, 64, dtype=torch.bfloat16, device="cuda")
    text = "a^T, b -> c, axis=0   c, same -> d, tie   d -> e, dtype=float32"
    transform = Transform(text)
    joined = torch.cat([a.T, b])
    result = transform.apply({"a": a, "b": b, "same": joined})["e"]
    assert result.device == a.device
    assert torch.equal(result, joined.float())
    on_host = {"e": torch.empty(48, 64)}
    transform.apply({"a": a, "b": b.cpu(), "same": joined}, on_host)
    assert torch.equal(on_host["e"], joined.float().cpu())
    other = joined.clone()
    other[3, 5] += 1
    with pytest.raises(TransformError, match="1 of 3072 elements differ"):
        transform.apply({"a": a, "b": b, "same": other}, on_host)


def test_torch_is_not_imported_for_numpy() -> None:
    script = """
import sys
import numpy as np
from remesh import Transform
state = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((3, 2), np.float32)}
Transform("a^T, b -> c, tie   c -> d, dtype=float16").apply(state)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
