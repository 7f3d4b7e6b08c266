"""What torch really builds, on gloo processes, against the contents of the full tensors."""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from remesh.adapters import describe_leaf
from remesh.core.state import Role, describe
from remesh.errors import StateError
from remesh.exchange import Exchange
from tests.adapters.fake_checkpoint import Capture, Captured, FakeCheckpoint, capture, restore
from tests.adapters.parallel_models import LAYOUTS, known_net, mesh_of
from tests.support import run_processes

WIDTHS = {2: (10, 3), 4: (10, 7, 5, 3, 1)}
"""World size → inner widths of the net."""

Case = tuple[str, int]


def job(net: nn.Module) -> dict[str, Any]:
    """A state whose optimizer has made one step with gradients equal to the parameters."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return {"net": net, "optim": optimizer}


def save_every_layout(_exchange: Exchange) -> dict[Case, Capture]:
    result = {}
    world_size = torch.distributed.get_world_size()
    for name, wrap in LAYOUTS[world_size].items():
        for width in WIDTHS[world_size]:
            state = job(wrap(known_net(width)))
            result[name, width] = capture(state)
        assert names_of_states(state["net"], state["optim"]) == {
            path[2] for path in result[name, width].paths.values() if path[:2] == ("optim", "state")
        }
    return result


def names_of_states(net: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    """The names that torch gives to the parameters that have state."""
    state: Any = get_optimizer_state_dict(net, optimizer)
    return set(state["state"])


def load_every_layout(
    _exchange: Exchange, checkpoints: dict[int, FakeCheckpoint]
) -> dict[Case, Capture]:
    """Load into modules of other contents; what they hold then, and run forward after it."""
    result = {}
    world_size = torch.distributed.get_world_size()
    for name, wrap in LAYOUTS[world_size].items():
        for width in WIDTHS[world_size]:
            net = wrap(known_net(width, start=-500.0))
            optimizer = torch.optim.AdamW(net.parameters())
            restored = restore({"net": net, "optim": optimizer}, checkpoints[width])
            assert restored.missing == restored.unexpected == set()
            assert restored.state["net"] is net
            result[name, width] = capture(restored.state)
            for parameter in net.parameters():
                moment = optimizer.state[parameter]["exp_avg"]
                assert type(moment) is type(parameter.detach())
            if width == 10:  # torch itself runs tensor parallelism only where it divides evenly
                net(torch.ones(2, 5)).sum().backward()
                optimizer.step()
    return result


def reference(width: int) -> FakeCheckpoint:
    return FakeCheckpoint([capture(job(known_net(width)))])


def check_against_reference(name: str, width: int, captures: list[Capture]) -> None:
    merged, expected = FakeCheckpoint(captures), reference(width)
    assert merged.names() == expected.names()
    for tensor_name, tensor in expected.tensors.items():
        # Steps of vectorised loops may round differently at the ends of a shard.
        np.testing.assert_allclose(
            merged.tensors[tensor_name].data, tensor.data, rtol=1e-6, err_msg=f"{name}, {width}"
        )
    assert merged.values == expected.values
    assert merged.lists == expected.lists


def every_layout(
    exchange: Exchange, checkpoints: dict[int, FakeCheckpoint]
) -> tuple[dict[Case, Capture], dict[Case, Capture]]:
    return save_every_layout(exchange), load_every_layout(exchange, checkpoints)


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_stores_and_loads_slices_of_the_full_tensor(world_size: int) -> None:
    checkpoints = {width: reference(width) for width in WIDTHS[world_size]}
    for checkpoint in checkpoints.values():
        for tensor in checkpoint.tensors.values():
            tensor.role = Role.ASSUMED
    saved, loaded = zip(*run_processes(world_size, every_layout, checkpoints), strict=True)
    for of_ranks in (saved, loaded):
        for name, width in of_ranks[0]:
            check_against_reference(name, width, [of_rank[name, width] for of_rank in of_ranks])
    if world_size == 4:
        captures = [of_rank["fsdp_over_tensor_parallel", 7] for of_rank in saved]
        held = [int(c.tensors["net.up.weight"].held.any(axis=1).sum()) for c in captures]
        assert held == [2, 2, 2, 1]


def on_two_ranks(exchange: Exchange, expected: FakeCheckpoint) -> dict[str, Any]:
    """What the tests of two ranks look at, in one job, which saves the time of starting others."""
    return {
        "roles": roles(exchange),
        "single": single_tensors(exchange),
        "corners": corner_cases(exchange),
        "shared out": zero_redundancy(exchange, expected),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_processes(2, on_two_ranks, reference(10))


def roles(_exchange: Exchange) -> dict[str, dict[str, Role]]:
    result = {}
    for name, wrap in LAYOUTS[2].items():
        entries = describe(wrap(known_net(4)), describe_leaf).tensors
        result[name] = {entry.name: entry.role for entry in entries}
    compiled = nn.Sequential(cast("nn.Module", torch.compile(LAYOUTS[2]["ddp"](known_net(4)))))
    entries = describe(compiled, describe_leaf).tensors
    result["compiled"] = {entry.name: entry.role for entry in entries}
    entries = describe(job(LAYOUTS[2]["ddp"](known_net(4))), describe_leaf).tensors
    result["optimizer"] = {e.name: e.role for e in entries if e.name.startswith("optim.")}
    ignoring = known_net(4)
    ignored = ["up.weight", "steps"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ignored)  # type: ignore[no-untyped-call]
    entries = describe(torch.nn.Sequential(LAYOUTS[2]["ddp"](ignoring)), describe_leaf).tensors
    result["ignoring"] = {entry.name: entry.role for entry in entries}
    return result


def test_roles_say_who_keeps_copies_equal(two_ranks: list[dict[str, Any]]) -> None:
    found = two_ranks[0]["roles"]
    equal, assumed = Role.EQUAL, Role.ASSUMED
    parameters = dict.fromkeys(("up.weight", "up.bias", "down.weight", "down.bias"), equal)
    # DDP broadcasts the buffers of its first rank.
    assert found["ddp"] == {**parameters, "steps": Role.FIRST}
    for layout in ("fsdp", "tensor_parallel"):
        assert found[layout] == {**parameters, "steps": assumed}
    prefixed = {f"0.{name}": role for name, role in found["ddp"].items()}
    assert found["compiled"] == prefixed
    assert len(found["optimizer"]) == 12
    assert set(found["optimizer"].values()) == {equal}
    assert found["ignoring"] == {**prefixed, "0.up.weight": assumed, "0.steps": assumed}


def packed_under_fsdp(_exchange: Exchange) -> Capture:
    """Two blocks of rows in one weight, each cut by tensor parallelism, then by FSDP2."""
    mesh = mesh_of(2, 2)
    full = torch.arange(28.0).reshape(14, 2)
    blocks = full.reshape(2, 7, 2)
    own = (blocks[:, :4], blocks[:, 4:])[mesh["tp"].get_local_rank()].reshape(-1, 2)
    weight = DTensor.from_local(
        own.clone(), mesh["tp"], [_StridedShard(0, split_factor=2)], run_check=False,
        shape=full.shape, stride=full.stride(),
    )  # fmt: skip
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    fully_shard(module, mesh=mesh["dp"])
    placements = str(cast("DTensor", module.weight).placements)
    assert placements == "(_StridedShard(dim=0, sf=2), _StridedShard(dim=0, sf=2))"
    return capture(module)


def test_packed_blocks_under_fsdp() -> None:
    captures = run_processes(4, packed_under_fsdp)
    merged = FakeCheckpoint(captures)
    assert merged.tensors["weight"].data.flatten().tolist() == list(range(28))
    rows = [np.flatnonzero(c.tensors["weight"].held[:, 0]).tolist() for c in captures]
    assert rows == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10], [11, 12, 13]]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def single_tensors(exchange: Exchange) -> dict[str, Any]:
    mesh = mesh_of(2)
    sub = torch.distributed.device_mesh.DeviceMesh("cpu", [1])
    full = torch.arange(24.0).reshape(12, 2)
    packed = full.reshape(2, 2, 3, 2)[:, exchange.rank].reshape(6, 2)
    tensors = {
        "replicated": distribute_tensor(full, mesh, [Replicate()]),
        "packed": DTensor.from_local(
            packed.clone(), mesh, [_StridedShard(0, split_factor=2)], shape=full.shape,
            stride=full.stride(), run_check=False,
        ),
        "elsewhere": DTensor.from_local(full, sub, [Replicate()], run_check=False),
        "negative": distribute_tensor(full, mesh, [Shard(-1)]),
        "gradient": distribute_tensor(full, mesh, [Shard(0)]).requires_grad_(),
    }  # fmt: skip
    errors = {}
    for name, tensor in {
        "sums": DTensor.from_local(full, mesh, [Partial()], run_check=False),
        "uneven": DTensor.from_local(
            full[: 3 + 2 * exchange.rank], mesh, [Shard(0)], shape=torch.Size([8, 2]),
            stride=(2, 1), run_check=False,
        ),
    }.items():  # fmt: skip
        with pytest.raises(StateError) as caught:
            describe({name: tensor}, describe_leaf)
        errors[name] = str(caught.value)
    num_parts = {e.name: len(e.parts) for e in describe(tensors, describe_leaf).tensors}
    del tensors["elsewhere"]
    again = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    checkpoint = FakeCheckpoint([capture({"packed": full, "replicated": full, "negative": full,
                                          "gradient": full})])  # fmt: skip
    restore(again, checkpoint)
    same = {name: torch.equal(local_of(again[name]), local_of(tensors[name])) for name in tensors}
    return {"captured": capture(tensors), "parts": num_parts, "errors": errors, "same": same}


def test_single_dtensors(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (of_rank["single"] for of_rank in two_ranks)
    assert first["parts"] == {
        "replicated": 1, "packed": 2, "elsewhere": 0, "negative": 1, "gradient": 1,
    }  # fmt: skip
    assert second["parts"]["elsewhere"] == 1
    assert set(first["same"].values()) == set(second["same"].values()) == {True}
    merged = FakeCheckpoint([first["captured"], second["captured"]])
    for tensor in merged.tensors.values():
        assert tensor.data.flatten().tolist() == list(range(24))
    assert "redistribute(" in first["errors"]["sums"]
    assert "uneven" in first["errors"]["uneven"]
    assert "(4, 2)" in first["errors"]["uneven"]
    assert "(3, 2)" in first["errors"]["uneven"]


def corner_cases(exchange: Exchange) -> dict[str, Any]:
    # FSDP2 that still has its gathered parameters, as after a forward pass for evaluation.
    net = LAYOUTS[2]["fsdp"](known_net(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with torch.no_grad():
        net(torch.ones(2, 5))
    gathered = [type(parameter) is nn.Parameter for parameter in net.parameters()]
    assert any(gathered)
    result: dict[str, Any] = {"gathered": capture({"optim": optimizer, "net": net})}

    # FSDP2 over a module without memory at first, with a shard that torch pads.
    with torch.device("meta"):
        empty = known_net(3)
    net = LAYOUTS[2]["fsdp"](empty).to_empty(device="cpu")
    restore({"net": net}, FakeCheckpoint([capture({"net": known_net(3)})]))
    result["materialised"] = capture({"net": net})
    result["output"] = net(torch.ones(2, 5)).tolist()

    net = LAYOUTS[2]["fsdp"](known_net(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    # Optimizer state that is sharded like its parameter, but is a plain tensor.
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = local_of(parameter.detach()).clone()
    with pytest.raises(
        StateError, match=r"(?s)optim\.state\.up\.weight\.momentum_buffer: .*DTensor"
    ):
        describe({"net": net, "optim": optimizer}, describe_leaf)
    # A load would replace it by a DTensor, which this optimizer cannot use.
    saved = FakeCheckpoint([capture({"net": known_net(4)})])
    with pytest.raises(StateError, match=r"this state of it a plain tensor"):
        restore({"net": net, "optim": optimizer}, saved)

    # State of a shape of its own, for a sharded parameter that has none yet.
    whole = FakeCheckpoint([capture({"net": known_net(4)})])
    factor = Captured("float32", np.arange(4, dtype="<f4"), np.ones(4, np.bool_), Role.EQUAL)
    whole.tensors["optim.state.up.weight.row"] = factor
    whole.paths["optim.state.up.weight.row"] = ("optim", "state", "up.weight", "row")
    fresh = torch.optim.SGD(net.parameters(), lr=0.5)
    restore({"net": net, "optim": fresh}, whole)
    row = fresh.state[next(net.parameters())]["row"]
    assert row.placements == (Replicate(),)
    assert row.to_local().tolist() == [0, 1, 2, 3]
    return result


def test_corner_cases(two_ranks: list[dict[str, Any]]) -> None:
    results = [of_rank["corners"] for of_rank in two_ranks]
    for case, width in (("gathered", 4), ("materialised", 3)):
        merged = FakeCheckpoint([of_rank[case] for of_rank in results])
        for name, tensor in capture({"net": known_net(width)}).tensors.items():
            assert merged.tensors[name].data.tolist() == tensor.data.tolist()
    np.testing.assert_allclose(
        results[1]["output"], known_net(3)(torch.ones(2, 5)).tolist(), rtol=1e-5
    )
    merged = FakeCheckpoint([of_rank["gathered"] for of_rank in results])
    assert merged.lists["optim.param_groups.0.params"] == [
        "up.weight", "up.bias", "down.weight", "down.bias",
    ]  # fmt: skip


def zero_redundancy(exchange: Exchange, checkpoint: FakeCheckpoint) -> tuple[Capture, Capture]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the module that is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def zero(net: nn.Module, rate: float) -> Any:
        return ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=rate)

    net = known_net(10)
    optimizer = zero(net, 0.25)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.optim.param_groups[0]["lr"] = 9.0  # out of date, as before every step
    saved = capture({"net": net, "optim": optimizer})

    target = known_net(10, start=-500.0)
    fresh = zero(target, 0.5)
    restored = restore({"net": target, "optim": fresh}, checkpoint)
    assert restored.missing == set()
    assert fresh.param_groups[0]["lr"] == fresh.optim.param_groups[0]["lr"] == 0.25
    assert 0 < len(fresh.optim.state) < 4
    return saved, capture(restored.state)


def test_optimizers_that_share_out_the_parameters(two_ranks: list[dict[str, Any]]) -> None:
    expected = reference(10)
    for captures in zip(*(of_rank["shared out"] for of_rank in two_ranks), strict=True):
        merged = FakeCheckpoint(captures)
        group = {name: set(names) for name, names in merged.lists.items()}
        assert group == {name: set(names) for name, names in expected.lists.items()}
        assert merged.names() == expected.names()
        assert merged.values["optim.param_groups.0.lr"] == 0.25
        for name, tensor in expected.tensors.items():
            np.testing.assert_allclose(merged.tensors[name].data, tensor.data, rtol=1e-6)
