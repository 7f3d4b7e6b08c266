from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import remesh
from remesh.adapters import (
    Block,
    Split,
    build_sharded_state_dict,
    default_sharded_state_dict,
    describe_leaf,
    shard_weight,
)
from remesh.core.geometry import Box
from remesh.core.sharded import ShardedTensor
from remesh.core.state import describe
from remesh.errors import StateError
from remesh.exchange import Exchange
from tests.adapters.stored import (
    SHAPE,
    check_equal,
    optimizer_with_state,
    randomise,
    saved,
    transfer,
    transformer,
)
from tests.support import run_processes, run_ranks


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, tuple[Block, ...]]:
    num_shards = draw(st.integers(1, 6))
    blocks = []
    for _ in range(draw(st.integers(2, 4))):
        units = draw(
            st.sampled_from(
                [n for n in range(1, 13) if not max(n, num_shards) % min(n, num_shards)]
            )
        )
        blocks.append(Block(units * draw(st.integers(1, 3)), units))
    return num_shards, tuple(blocks)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(splits())
def test_shards_of_blocks_cover_each_block(case: tuple[int, tuple[Block, ...]]) -> None:
    num_shards, blocks = case
    held: list[list[int]] = []
    for shard in range(num_shards):
        extent = sum(b.size // min(b.num_units or 0, num_shards) for b in blocks)
        total, segments = Split(0, shard, num_shards, blocks).segments(extent, "w")
        assert total == sum(block.size for block in blocks)
        assert sum(length for _, length in segments) == extent
        held.append([i for start, length in segments for i in range(start, start + length)])
    counts = [sum(index in of_rank for of_rank in held) for index in range(total)]
    expected = [max(num_shards // (b.num_units or 1), 1) for b in blocks for _ in range(b.size)]
    assert counts == expected


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 3))
def test_padding_is_left_out(num_shards: int, size: int, extra: int) -> None:
    extent = -(-size // num_shards) + extra
    indices: list[int] = []
    for shard in range(num_shards):
        total, segments = Split(0, shard, num_shards, (Block(size),)).segments(extent, "w")
        assert total == size
        for start, length in segments:
            indices += range(start, start + length)
    assert indices == list(range(size))


def test_shard_weight_cuts_several_dims_and_transposes() -> None:
    local = torch.arange(24.0).reshape(2, 3, 4)
    shards = shard_weight("w", local, Split(0, 1, 3), Split(-1, 1, 2))
    assert shards.global_shape == (6, 3, 8)
    assert [part.box for part in shards.parts] == [Box((2, 0, 4), (2, 3, 4))]
    matrix = torch.arange(6.0).reshape(2, 3)
    turned = shard_weight("w", matrix.t(), Split(0, 1, 2, (Block(5),)))
    assert turned.global_shape == (5, 2)
    (part,) = turned.parts
    assert part.box == Box((3, 0), (2, 2))
    assert part.data.tolist() == [[0, 3], [1, 4]]  # type: ignore[attr-defined]
    assert part.data.data_ptr() == matrix.data_ptr()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: shard_weight("w", w, Split(2, 0, 2)), "dim 2 is cut twice or does not exist"),
        (lambda w: shard_weight("w", w, Split(0, 0, 2), Split(-2, 0, 2)), "dim -2 is cut twice"),
        (lambda w: Split(0, 2, 2), "shard 2 of 2 does not exist"),
        (lambda w: Split(0, 0, 3, (Block(8, 2),)), "Neither number of units and shards"),
        (lambda w: shard_weight("w", w, Split(0, 0, 2, (Block(9),))), "w: 2 shards of extent 4"),
        (
            lambda w: shard_weight("w", w, Split(0, 0, 2, (Block(3), Block(4)))),
            "w: 2 shards of extent 1 ",
        ),
        (lambda w: shard_weight("w", w, Split(0, 0, 2, (Block(4), Block(6)))), "has extent 5"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        call(torch.zeros(4, 4))


def test_optimizer_state_of_a_transposed_weight_is_transposed() -> None:
    class Head(nn.Linear):
        def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
            name = f"{prefix}weight"
            return {name: shard_weight(name, self.weight.detach().t())}

    head, plain = Head(3, 5, bias=False), nn.Linear(5, 3, bias=False)
    source, target = optimizer_with_state(head, 1), torch.optim.AdamW(plain.parameters())
    transfer({"head": head, "optimizer": source}, {"head": plain, "optimizer": target})
    assert torch.equal(plain.weight, head.weight.t())
    for key in ("exp_avg", "exp_avg_sq"):
        moment = target.state[plain.weight][key]
        assert torch.equal(moment, source.state[head.weight][key].t())


def test_nested_state_of_shards_keeps_its_containers() -> None:
    def build(value: float) -> tuple[dict[str, Any], Any]:
        model = transformer(layers=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model.get_parameter("embedding.weight")
        history = [torch.full_like(weight.detach(), value + n) for n in range(2)]
        optimizer.state[weight] = {"history": history, "seen": (torch.tensor(value), {"n": value})}
        return {"model": model, "optimizer": optimizer}, optimizer.state[weight]

    source, expected = build(3.0)
    target, own = build(4.0)
    transfer(source, target)
    assert str(own) == str(expected)
    model = transformer(layers=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transfer(source, {"model": model, "optimizer": optimizer})
    assert str(optimizer.state[model.embedding.weight]) == str(expected)


def test_resharding_live_from_shards_to_the_whole() -> None:
    model = transformer()
    randomise(model, 2)
    source = {"model": model, "optimizer": optimizer_with_state(model, 3)}

    def fresh(*tp: int) -> dict[str, Any]:
        model = transformer(*tp)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.25)}

    def reshard(exchange: Exchange) -> None:
        shards = fresh(exchange.rank, 2)
        remesh.reshard(source if exchange.rank == 0 else {}, shards, group=exchange)
        target = fresh() if exchange.rank == 1 else {}
        remesh.reshard(shards, target, group=exchange)
        if exchange.rank == 1:
            check_equal(saved(target), saved(source))

    run_ranks(2, reshard)


@pytest.mark.parametrize("mark", ["tensor_model_parallel", "is_distributed"])
def test_a_marked_shard_that_nobody_declares_is_refused(mark: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), transformer(layers=1))
    setattr(model[0].weight, mark, True)
    told = rf"(?s)model\.0\.weight: .*{mark}=True\n.*build_sharded"
    with pytest.raises(StateError, match=told):
        describe({"model": model}, describe_leaf)
    declared = transformer(layers=1)
    for parameter in declared.parameters():
        setattr(parameter, mark, True)
    with pytest.raises(StateError, match=r"layers\.0\.mixture\.router\.weight"):
        describe({"m": declared}, describe_leaf)


class Wrong(nn.Linear):
    """Says what it is told to say; its weight is the first half of a buffer."""

    said: Any = None

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.both = torch.zeros(2 * num_inputs * num_outputs)
        self.weight = nn.Parameter(self.both[:4].view(2, 2))

    def sharded_state_dict(self, prefix: str = "") -> Any:
        return self.said(self, prefix)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (lambda m, p: {f"{p}weight": m.weight}, r"'0\.weight' is a torch\.nn\.parameter"),
        (lambda m, p: {"weight": ShardedTensor.whole("w", m.weight)}, "'weight' is no tensor of"),
        (
            lambda m, p: {f"{p}weights": ShardedTensor.whole("w", m.weight)},
            r"sharded_state_dict\('0\.'\): '0\.weights' is no tensor of",
        ),
        (
            lambda m, p: {f"{p}weight": ShardedTensor.whole("w", m.weight.detach())},
            r"leaves out 0\.bias",
        ),
        (
            lambda m, p: {
                f"{p}weight": ShardedTensor.whole(f"{p}weight", m.both[4:8].view(2, 2)),
                f"{p}bias": ShardedTensor.whole(f"{p}bias", m.bias.detach()),
            },
            r"data of '0\.weight' is not memory of the module's tensor",
        ),
        (
            lambda m, p: build_sharded_state_dict(
                {k: v.clone() for k, v in m.state_dict().items()}, {}, p, shard=0, num_shards=1
            ),
            "is not memory of the module's tensor",
        ),
    ],
)
def test_a_module_that_describes_itself_wrongly_is_refused(said: Any, message: str) -> None:
    model = nn.Sequential(Wrong(2, 2))
    model[0].said = said
    with pytest.raises(StateError, match=message):
        describe({"model": model}, describe_leaf)


def test_state_of_a_shard_with_another_shape_is_refused() -> None:
    model = transformer(0, 2, layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    weight = model.get_parameter("layers.0.attention.out.weight")
    optimizer.state[weight]["row"] = torch.zeros(4)
    with pytest.raises(StateError, match=r"opt\.state\.layers\.0\.attention\.out\.weight\.row"):
        describe({"model": model, "opt": optimizer}, describe_leaf)


def test_a_module_on_the_meta_device_is_described() -> None:
    with torch.device("meta"):
        model = transformer(1, 2, layers=1)
    shapes = {e.name: e.global_shape for e in describe(model, describe_leaf).tensors}
    assert shapes["embedding.weight"] == (SHAPE.vocabulary, SHAPE.hidden)
    assert shapes["layers.0.attention.qkv.weight"] == (16, SHAPE.hidden)
    model = model.to_empty(device="cpu")
    whole = transformer(layers=1)
    randomise(whole, 1)
    transfer(whole, model)
    full: Any = whole.get_parameter("layers.0.attention.qkv.weight")
    assert torch.equal(
        model.get_parameter("layers.0.attention.qkv.weight"),
        torch.cat([part.chunk(2)[1] for part in full.split([8, 4, 4])]),
    )


def test_the_default_speaks_for_all_entries() -> None:
    model = transformer(1, 2, layers=1)
    said = default_sharded_state_dict(model, "m.")
    assert said.keys() == {f"m.{key}" for key in model.state_dict()}
    assert said["m.layers.0.norm.weight"].parts[0].box == Box.whole((SHAPE.hidden,))
    assert said["m.layers.0.mixture.experts.0.down.weight"].global_shape == (8, 4)


def test_layers_that_checkpoint_activations_are_declared_as_without() -> None:
    plain, wrapped = transformer(1, 2, layers=1), transformer(1, 2, layers=1)
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    boxes = []
    for model in (plain, wrapped):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            parameter.tensor_model_parallel = name.endswith("qkv.weight")  # type: ignore[attr-defined]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        tensors = describe(state, describe_leaf).tensors
        boxes.append({e.name: [part.box for part in e.parts] for e in tensors})
    assert boxes[0] == boxes[1]
    name = "layers.0.attention.qkv.weight"
    assert boxes[1][f"model.{name}"] != [Box.whole((16, SHAPE.hidden))]
    assert boxes[1][f"optimizer.state.{name}.momentum_buffer"] == boxes[1][f"model.{name}"]


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), checkpoint_wrapper])
def test_the_default_of_a_wrapper_is_what_the_module_in_it_declares(
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
) -> None:
    layer: Any = transformer(1, 2, layers=1).layers[0].attention
    plain, wrapped = (default_sharded_state_dict(one, "m.") for one in (layer, wrap(layer)))
    shapes = [{key: one.global_shape for key, one in said.items()} for said in (plain, wrapped)]
    assert [*shapes[0].values()] == [*shapes[1].values()]


def fsdp_over_shards(exchange: Exchange, source: str, target: str) -> bool:
    """FSDP2 over layers that are cut by hand: two mesh axes, of which torch knows one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = transformer(mesh["tp"].get_local_rank(), 2, layers=1)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    remesh.load(state, source, unexpected="error")
    remesh.save(state, target)
    weight = model.get_parameter("layers.0.attention.qkv.weight")
    return isinstance(optimizer.state[weight]["exp_avg"], DTensor)


def test_fsdp_over_layers_that_are_cut_by_hand(tmp_path: Path) -> None:
    model = transformer(layers=1)
    randomise(model, 8)
    state = {"model": model, "optimizer": optimizer_with_state(model, 9)}
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    remesh.save(state, source)
    assert run_processes(4, fsdp_over_shards, source, target) == [True] * 4
    check_equal(target, source)
