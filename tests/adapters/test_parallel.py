"""What torch really builds, on gloo processes, against the contents of the full tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import remesh
from remesh.adapters import DescribedOptimizer, NamedModule, describe_leaf
from remesh.core.state import Role, describe
from remesh.errors import StateError, UnsupportedValueError
from remesh.exchange import Exchange
from tests.adapters.parallel_models import (
    CPU,
    LAYOUTS,
    NOT_RUN,
    Block,
    Model,
    State,
    evaluate,
    fsdp1,
    job,
    mesh_of,
    set_moments,
    train,
)
from tests.adapters.stored import check_equal
from tests.support import run_processes
from tests.support.torch_versions import has, needs


def known_job(wrap: Callable[[Model], nn.Module], *, runs: bool = True) -> State:
    """A job whose model and moments have known contents."""
    state = job(wrap(Model(1)))
    set_moments(state["optimizer"])
    if runs:
        evaluate(state["model"])
    return state


def save_and_load(exchange: Exchange, folder: Path, names: list[str]) -> dict[str, list[float]]:
    """For each layout, save the known job; load and save the whole one; and train on."""
    losses = {}
    for name in names:
        runs = name not in NOT_RUN
        remesh.save(known_job(LAYOUTS[name], runs=runs), folder / f"saved {name}")
        state = job(LAYOUTS[name](Model(2)))
        if runs:
            evaluate(state["model"])
        remesh.load(state, folder / "whole", unexpected="error")
        for parameter, own in state["optimizer"].state.items():
            assert type(own["exp_avg"]) is type(parameter.detach())
        remesh.save(state, folder / f"again {name}")
        if runs and has("gloo averages"):
            losses[name] = train(state)
    return losses


@pytest.mark.parametrize(
    ("world_size", "names"),
    [
        (2, ["ddp", "fsdp2", "tensor parallel", "full flat"]),
        (4, ["fsdp2", "hybrid fsdp2", "fsdp2 over tensor parallel"]),
        pytest.param(
            2,
            [
                "grad_op original",
                "no_shard flat",
                "no_shard original",
                "mixed flat",
                "mixed original",
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4, ["full original", "hybrid flat", "hybrid original"], marks=pytest.mark.slow
        ),
    ],
)
def test_every_layout_stores_and_loads_slices_of_the_full_tensor(
    tmp_path: Path, world_size: int, names: list[str]
) -> None:
    whole = known_job(lambda model: model)
    remesh.save(whole, tmp_path / "whole")
    losses = run_processes(world_size, save_and_load, tmp_path, names)[0]
    for name in names:
        check_equal(tmp_path / f"saved {name}", tmp_path / "whole")
        check_equal(tmp_path / f"again {name}", tmp_path / "whole")
    expected = train(whole)
    for name, of_layout in losses.items():
        tolerance = 0.05 if name.startswith("mixed") else 1e-5
        assert of_layout == pytest.approx(expected, rel=tolerance), name


# ---------------------------------------------------------------------------------------------
# Corner cases of two ranks
# ---------------------------------------------------------------------------------------------


def roles_of(state: Any) -> dict[str, Role]:
    return {entry.name: entry.role for entry in describe(state, describe_leaf).tensors}


def roles_say_who_keeps_copies_equal(_exchange: Exchange, _folder: Path) -> None:
    equal, assumed = Role.EQUAL, Role.ASSUMED
    buffers = ("blocks.0.counts", "blocks.1.counts")
    parameters = dict.fromkeys(
        (name for name, _ in Model(1).named_parameters(remove_duplicate=False)), equal
    )
    # DDP broadcasts the buffers of its first rank.
    of_ddp = {**parameters, **dict.fromkeys(buffers, Role.FIRST)}
    assert roles_of(LAYOUTS["ddp"](Model(1))) == of_ddp
    for name in ("fsdp2", "full flat"):
        found = roles_of(LAYOUTS[name](Model(1)))
        assert found == {**parameters, **dict.fromkeys(buffers, assumed)}
    for name, role in roles_of(LAYOUTS["tensor parallel"](Model(1))).items():
        assert role is (equal if ".up." in name or ".down." in name else assumed), name
    prefixed = {f"0.{name}": role for name, role in of_ddp.items()}
    compiled = cast("nn.Module", torch.compile(LAYOUTS["ddp"](Model(1))))
    assert roles_of(nn.Sequential(compiled)) == prefixed
    of_job = roles_of(known_job(LAYOUTS["ddp"]))
    of_optimizer = [role for name, role in of_job.items() if name.startswith("optimizer.")]
    assert of_optimizer == [equal] * 3 * len([*Model(1).parameters()])
    ignoring, ignored = Model(1), ["head.bias", "blocks.0.counts"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignoring, ignored)  # type: ignore[no-untyped-call]
    not_synchronised = {f"0.{name}": assumed for name in ignored}
    assert roles_of(nn.Sequential(LAYOUTS["ddp"](ignoring))) == prefixed | not_synchronised


def single_dtensors(exchange: Exchange, folder: Path) -> None:
    full, mesh = torch.arange(24.0).reshape(12, 2), mesh_of(2)
    packed = full.reshape(2, 2, 3, 2)[:, exchange.rank].reshape(6, 2)

    def of_local(local: torch.Tensor, placement: Any, mesh: Any = mesh) -> DTensor:
        form: Any = {"shape": full.shape, "stride": full.stride(), "run_check": False}
        return DTensor.from_local(local, mesh, [placement], **form)

    first = torch.distributed.device_mesh.DeviceMesh("cpu", [1])
    tensors: dict[str, Any] = {
        "replicated": distribute_tensor(full, mesh, [Replicate()]),
        "packed": of_local(packed.clone(), _StridedShard(0, split_factor=2)),
        "elsewhere": of_local(full.clone(), Replicate(), first),
        "negative": distribute_tensor(full, mesh, [Shard(-1)]),
        "gradient": distribute_tensor(full, mesh, [Shard(0)]).requires_grad_(),
    }
    remesh.save(tensors, folder)
    for name in tensors:
        assert torch.equal(remesh.Checkpoint(folder).read(name), full), name
    del tensors["elsewhere"]
    again: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    remesh.load(again, folder)
    for name, tensor in tensors.items():
        assert torch.equal(again[name].to_local(), tensor.to_local()), name
    with pytest.raises(StateError, match=r"redistribute\("):
        describe({"sums": of_local(full, Partial())}, describe_leaf)
    wrong = of_local(full[: 5 + 2 * exchange.rank], Shard(0))
    with pytest.raises(StateError, match=r"(?s)\(6, 2\) .* one of shape \([57], 2\)\. .*uneven"):
        describe({"uneven": wrong}, describe_leaf)


def from_the_meta_device(_exchange: Exchange, folder: Path) -> None:
    """Built without memory, which slices alone are given."""
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(), Block())
    remesh.save({"model": blocks}, folder)
    num_bytes = sum(parameter.nbytes for parameter in blocks.parameters())
    with torch.device("meta"):
        first, second = (nn.Sequential(Block(), Block()) for _ in range(2))
    for layer in (*first, first):
        fully_shard(layer, mesh=mesh_of(2))
    empty = (
        first.to_empty(device="cpu"),
        fsdp1(
            second,
            use_orig_params=True,
            param_init_fn=lambda module: module.to_empty(device=CPU, recurse=False),
        ),
    )
    for module in empty:
        report = remesh.load({"model": module}, folder)
        assert report.bytes_needed < 0.65 * num_bytes  # rows do not divide evenly
        torch.testing.assert_close(module(torch.ones(2, 5)), blocks(torch.ones(2, 5)))


def state_of_another_form(_exchange: Exchange, folder: Path) -> None:
    """State of a sharded parameter: a part that does not say so, or of a shape of its own."""
    whole, net = Model(1), LAYOUTS["fsdp2"](Model(1))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    optimizer.state[whole.embedding.weight]["row"] = torch.arange(4.0)
    remesh.save({"model": whole, "optimizer": optimizer}, folder)
    fresh = torch.optim.SGD(net.parameters(), lr=0.5)
    remesh.load({"model": net, "optimizer": fresh}, folder)
    row = fresh.state[net.get_parameter("embedding.weight")]["row"]
    assert row.placements == (Replicate(),)
    assert row.to_local().tolist() == [0, 1, 2, 3]
    for parameter in net.parameters():
        local = cast("DTensor", parameter.detach()).to_local()
        fresh.state[parameter] = {"momentum_buffer": local.clone()}
    state = {"model": net, "optimizer": fresh}
    refused = r"(?s)optimizer\.state\.\S+\.momentum_buffer: .*DTensor, this state of it a plain"
    with pytest.raises(StateError, match=refused):
        describe(state, describe_leaf)
    # A load would replace it by a DTensor, which this optimizer cannot use.
    with pytest.raises(StateError, match=refused):
        remesh.load(state, folder, missing="keep")


def parameters_shared_out(_exchange: Exchange, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the module that is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def zero(seed: int, rate: float) -> State:
        model = Model(seed)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=rate)
        return {"optimizer": optimizer, "model": model}

    remesh.save(known_job(lambda model: model), folder / "whole")
    source, target = zero(1, 0.125), zero(2, 0.5)
    set_moments(source["optimizer"].optim)
    source["optimizer"].optim.param_groups[0]["lr"] = 9.0  # out of date, as before every step
    remesh.save(source, folder / "saved")
    check_equal(folder / "saved", folder / "whole")
    remesh.load(target, folder / "whole", unexpected="error")
    remesh.save(target, folder / "again")
    check_equal(folder / "again", folder / "whole")
    fresh = target["optimizer"]
    assert fresh.param_groups[0]["lr"] == fresh.optim.param_groups[0]["lr"] == 0.125
    assert 0 < len(fresh.optim.state) < len([*target["model"].parameters()])


def copies_of_parts(_exchange: Exchange, folder: Path) -> None:
    """An optimizer over plain copies of this rank's parts of FSDP2's parameters."""
    torch.manual_seed(0)
    block = Block()
    whole = copy.deepcopy(block)
    fully_shard(block, mesh=mesh_of(2))
    copies = {cast("DTensor", p).to_local().detach() + 1: p for p in block.parameters()}
    described = DescribedOptimizer(torch.optim.AdamW(copies), copies, own_key="master")
    remesh.save({"m": block, "o": described}, folder)
    for name, parameter in whole.named_parameters():
        master = remesh.Checkpoint(folder).read(f"o.state.{name}.master")
        assert torch.equal(master, parameter.detach() + 1)


def padding_and_ignored_parameters(_exchange: Exchange, folder: Path) -> None:
    """Slices that hold padding only; names that change; parameters that FSDP1 does not manage."""
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(2, 3)
    with torch.no_grad():
        for number, parameter in enumerate([*first.parameters(), *second.parameters()]):
            parameter.fill_(number + 1.0)
    wrapped = nn.Sequential(
        FullyShardedDataParallel(first, device_id=CPU),
        FullyShardedDataParallel(second, device_id=CPU, ignored_states=[second.bias]),
    )
    leaf = NamedModule(wrapped, {"0": "layers.4", "1": "layers.5"})
    optimizer = torch.optim.AdamW(wrapped.parameters())
    set_moments(optimizer)
    remesh.save({"m": leaf, "o": optimizer}, folder)
    checkpoint = remesh.Checkpoint(folder)
    expected = {"4.weight": [[1]], "5.weight": [[2, 2]] * 3, "5.bias": [3, 3, 3]}
    for name, values in expected.items():
        assert checkpoint.read(f"m.layers.{name}").tolist() == values
        moment = checkpoint.read(f"o.state.layers.{name}.exp_avg")
        assert torch.equal(moment, 2 * checkpoint.read(f"m.layers.{name}"))
    assert sum(name.startswith("m.") for name in checkpoint.index) == 3


class TiedHead(nn.Module):
    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_tokens, 4)
        self.body = nn.Linear(4, 40)
        self.head = nn.Linear(4, num_tokens, bias=False)
        self.head.weight = self.embedding.weight


def ties_of_which_a_rank_holds_nothing(exchange: Exchange, folder: Path) -> None:
    """The embedding lies on rank 0 alone: it is small, or has a single row."""
    whole = {"model": TiedHead(1)}
    remesh.save(whole, folder / "whole")
    rows = TiedHead(1)
    fully_shard(rows, mesh=mesh_of(2))
    wrapped: dict[str, nn.Module] = {
        "flat": FullyShardedDataParallel(TiedHead(1), device_id=CPU),
        "original": FullyShardedDataParallel(TiedHead(1), device_id=CPU, use_orig_params=True),
        "rows": rows,
    }
    for name, model in wrapped.items():
        state = job(model)
        set_moments(state["optimizer"])
        described = describe(state, describe_leaf).tensors
        [own] = [entry for entry in described if entry.name == "model.head.weight"]
        assert bool(own.parts) is (exchange.rank == 0)
        remesh.load({"model": model}, folder / "whole", unexpected="error")
        remesh.save(state, folder / name)
        checkpoint = remesh.Checkpoint(folder / name)
        assert checkpoint.index.aliases == {"model.head.weight": "model.embedding.weight"}
        weight = remesh.Checkpoint(folder / "whole").read("model.embedding.weight")
        assert torch.equal(checkpoint.read("model.head.weight"), weight)
        remesh.load(state, folder / name, unexpected="error")


def offloaded(_exchange: Exchange, folder: Path) -> None:
    offload = CPUOffload(offload_params=True)
    module = fsdp1(Model(1), cpu_offload=offload, use_orig_params=False)
    remesh.save({"model": module}, folder / "offloaded")
    remesh.save({"model": Model(1)}, folder / "whole")
    check_equal(folder / "offloaded", folder / "whole")


class Speaking(nn.Linear):
    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        return {}


def refused_by_fsdp1(_exchange: Exchange, _folder: Path) -> None:
    own = FullyShardedDataParallel(nn.Sequential(Speaking(2, 2)), device_id=CPU)
    with pytest.raises(UnsupportedValueError, match=r"(?s)m: .*sharded_state_dict.*fully_shard"):
        describe({"m": own}, describe_leaf)
    turned = nn.Linear(3, 2)
    turned.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2).t())
    own = FullyShardedDataParallel(turned, device_id=CPU)
    with pytest.raises(UnsupportedValueError, match=r"(?s)m: .*weight was not contiguous"):
        describe({"m": own}, describe_leaf)


@pytest.mark.parametrize(
    "case",
    [
        roles_say_who_keeps_copies_equal,
        single_dtensors,
        from_the_meta_device,
        state_of_another_form,
        parameters_shared_out,
        copies_of_parts,
        padding_and_ignored_parameters,
        ties_of_which_a_rank_holds_nothing,
        offloaded,
        refused_by_fsdp1,
    ],
)
def test_on_two_ranks(tmp_path: Path, case: Callable[[Exchange, Path], None]) -> None:
    run_processes(2, case, tmp_path)


def packed_under_fsdp(_exchange: Exchange, folder: Path) -> None:
    """Two blocks of rows in one weight, each cut by tensor parallelism, then by FSDP2."""
    mesh = mesh_of(2, 2)
    full = torch.arange(28.0).reshape(14, 2)
    blocks = full.reshape(2, 7, 2)
    own = (blocks[:, :4], blocks[:, 4:])[mesh["tp"].get_local_rank()].reshape(-1, 2)
    weight = DTensor.from_local(
        own.clone(),
        mesh["tp"],
        [_StridedShard(0, split_factor=2)],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    fully_shard(module, mesh=mesh["dp"])
    placements = str(cast("DTensor", module.weight).placements)
    assert placements == "(_StridedShard(dim=0, sf=2), _StridedShard(dim=0, sf=2))"
    remesh.save(module, folder)
    assert torch.equal(remesh.Checkpoint(folder).read("weight"), full)


def as_torch_distributes(_exchange: Exchange, folder: Path) -> None:
    """Blocks that are cut before other axes cut the same dim."""
    blocks, full = _StridedShard(0, split_factor=3), torch.arange(48.0).reshape(24, 2)
    layouts: dict[str, list[Any]] = {
        "blocks first": [blocks, Shard(0)],
        "blocks last": [Shard(0), blocks],
        "other dim": [blocks, Shard(1)],
    }
    mesh = mesh_of(2, 2)
    tensors = {name: distribute_tensor(full, mesh, how) for name, how in layouts.items()}
    remesh.save(tensors, folder)
    for name in layouts:
        assert torch.equal(remesh.Checkpoint(folder).read(name), full), name


@pytest.mark.parametrize(
    "case", [packed_under_fsdp, pytest.param(as_torch_distributes, marks=needs("strided shards"))]
)
def test_packed_blocks_on_four_ranks(
    tmp_path: Path, case: Callable[[Exchange, Path], None]
) -> None:
    run_processes(4, case, tmp_path)
