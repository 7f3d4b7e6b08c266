"""Tensors stored in another size: vocabularies that grow and shrink, with their moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import remesh
from remesh import ShardedTensor
from remesh.exchange import Exchange
from remesh.sharding import Box, LocalNonpersistentObject, Part
from tests.support import run_processes

OLD, DIM = 6, 4
INITIAL = 9.0
"""What a new element is before a load."""


class Model(nn.Module):
    def __init__(self, rows: int, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, DIM)
        self.head = nn.Linear(DIM, rows, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.embed(tokens))
        return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.tensor([[0, 1, 2], [2, 1, 1]])).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(rows: int, *, tied: bool = False) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Model(rows, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def fresh(rows: int, *, tied: bool = False) -> dict[str, Any]:
    model = Model(rows, tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(INITIAL)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)}


def full(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters and the moments of a state, whole."""
    found = {}
    for name, parameter in state["model"].named_parameters():
        found[name] = full(parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = full(state["optimizer"].state[parameter][key])
    return found


def expected(before: torch.Tensor, rows: int, policy: str) -> torch.Tensor:
    new = {"keep": torch.full((DIM,), INITIAL), "zeros": torch.zeros(DIM), "mean": before.mean(0)}
    more = new[policy].expand(max(rows - len(before), 0), DIM)
    return torch.cat([before[:rows], more])


def check(state: dict[str, Any], before: dict[str, torch.Tensor], rows: int, policy: str) -> None:
    now = tensors_of(state)
    assert now.keys() == before.keys()
    for name, tensor in now.items():
        is_moment = "exp_avg" in name
        wanted = expected(before[name], rows, "zeros" if is_moment else policy)
        same = min(rows, OLD)
        assert torch.equal(tensor[:same], wanted[:same]), name
        torch.testing.assert_close(tensor, wanted, msg=name)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [4, 6, 9])
@pytest.mark.parametrize("policy", ["keep", "zeros", "mean"])
def test_a_vocabulary_grows_and_shrinks(policy: Any, rows: int, tied: bool, tmp_path: Path) -> None:
    source = trained(OLD, tied=tied)
    before = tensors_of(source)
    remesh.save(source, tmp_path)
    state = fresh(rows, tied=tied)
    # A tied tensor may be called by either of its names.
    resize: dict[str, Any] = {"model.head.weight": policy} if tied else {"*.weight": policy}
    report = remesh.load(state, tmp_path, resize=resize)
    check(state, before, rows, policy)
    resized = (
        set()
        if rows == OLD
        else {f"model.{n}" for n in before if "exp" not in n}
        | {f"optimizer.state.{n}" for n in before if "exp" in n}
    )
    assert set(report.resized) == resized
    step(state["model"], state["optimizer"])
    assert all(tensor.isfinite().all() for tensor in tensors_of(state).values())
    assert state["optimizer"].state[state["model"].embed.weight]["step"].item() == 3


def test_a_file_of_torch_save_is_resized_with_its_optimizer(tmp_path: Path) -> None:
    source = trained(OLD)
    torch.save({key: part.state_dict() for key, part in source.items()}, tmp_path / "state.pt")
    state = fresh(9)
    remesh.load(state, tmp_path / "state.pt", resize={"model.*": "keep"})
    check(state, tensors_of(source), 9, "keep")


def test_moments_of_a_stepped_optimizer_follow_in_place(tmp_path: Path) -> None:
    source = trained(OLD)
    before = tensors_of(source)
    remesh.save(source, tmp_path)
    state = trained(9)
    moment = state["optimizer"].state[state["model"].embed.weight]["exp_avg"]
    remesh.load(state, tmp_path, resize={"model.*": "zeros"})
    check(state, before, 9, "zeros")
    assert state["optimizer"].state[state["model"].embed.weight]["exp_avg"] is moment


@pytest.mark.parametrize("shape", [(OLD, OLD), (OLD,)])
def test_state_of_another_form_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    source = trained(OLD)
    source["optimizer"].state[source["model"].embed.weight]["factor"] = torch.ones(shape)
    remesh.save(source, tmp_path)
    state = fresh(9)
    with pytest.raises(remesh.MismatchError, match="factor: state of shape") as caught:
        remesh.load(state, tmp_path, resize={"*.weight": "keep"})
    assert len(caught.value.conflicts) == 1
    assert not state["optimizer"].state
    remesh.load({"model": state["model"]}, tmp_path, resize={"*.weight": "keep"})


@pytest.mark.parametrize("policy", ["keep", "mean"])
@pytest.mark.parametrize("rows", [4, 9])
def test_what_a_transformation_renames_is_resized(policy: Any, rows: int, tmp_path: Path) -> None:
    source = trained(OLD)
    before = tensors_of(source)
    remesh.save({"old": source["model"], "optimizer": source["optimizer"]}, tmp_path)
    state = fresh(rows)
    report = remesh.load(
        state, tmp_path, transform={"old.": "model."}, resize={"model.*": policy},
    )  # fmt: skip
    check(state, before, rows, policy)
    assert not report.unexpected
    assert set(report.resized) >= {f"model.{n}" for n in before if "exp" not in n}


def test_what_a_transformation_makes_is_not_resized(tmp_path: Path) -> None:
    source = trained(OLD)
    remesh.save(source, tmp_path)
    state = fresh(9)
    for statement in ("model.embed.weight^T -> net.embed.weight", {"model.": "net."}):
        with pytest.raises(remesh.RemeshError, match=r"\(9, 4\)"):
            remesh.load({"net": state["model"]}, tmp_path, transform=statement, missing="keep")
    assert all(parameter.eq(INITIAL).all() for parameter in state["model"].parameters())


def test_what_a_transformation_leaves_alone_is_resized(tmp_path: Path) -> None:
    source = trained(OLD)
    remesh.save({**source, "old": torch.ones(2)}, tmp_path)
    state, new = fresh(9), torch.zeros(2)
    options: dict[str, Any] = {"resize": {"*.weight": "keep"}}
    remesh.load({**state, "new": new}, tmp_path, transform={"old": "new"}, **options)
    assert new.tolist() == [1, 1]
    check(state, tensors_of(source), 9, "keep")


class Declared(nn.Module):
    """A module that describes its parameter by itself, in two boxes."""

    def __init__(self, rows: int, *, is_allowed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, DIM), INITIAL))
        self.is_allowed = is_allowed

    def sharded_state_dict(self, prefix: str = "") -> dict[str, ShardedTensor]:
        name, rows = f"{prefix}weight", len(self.weight)
        parts = tuple(
            Part(Box((start, 0), (stop - start, DIM)), self.weight.detach()[start:stop])
            for start, stop in ((0, 2), (2, rows))
        )
        allowed = self.is_allowed
        return {name: ShardedTensor(name, (rows, DIM), parts, None, allow_shape_mismatch=allowed)}


@pytest.mark.parametrize("is_allowed", [False, True])
@pytest.mark.parametrize("rows", [4, 9])
def test_moments_of_a_declared_parameter_follow(
    rows: int, is_allowed: bool, tmp_path: Path
) -> None:
    def optimized(rows: int) -> tuple[Declared, torch.optim.Optimizer]:
        module = Declared(rows, is_allowed=is_allowed)
        return module, torch.optim.AdamW(module.parameters(), lr=0.1)

    source, optimizer = optimized(OLD)
    loss: Any = source.weight.square().sum()
    loss.backward()
    optimizer.step()
    before = optimizer.state[source.weight]["exp_avg"]
    remesh.save({"model": source, "optimizer": optimizer}, tmp_path)
    module, restored = optimized(rows)
    resize: Any = {} if is_allowed else {"model.weight": "keep"}
    remesh.load({"model": module, "optimizer": restored}, tmp_path, resize=resize)
    policy = "zeros" if is_allowed else "keep"
    assert torch.equal(module.weight, expected(source.weight, rows, policy))
    moment = restored.state[module.weight]["exp_avg"]
    assert torch.equal(moment, expected(before, rows, "zeros"))


def test_factored_moments_follow_in_the_dims_that_they_have(tmp_path: Path) -> None:
    source = Model(OLD)
    optimizer = torch.optim.Adafactor(source.parameters())
    step(source, optimizer)
    remesh.save({"model": source, "optimizer": optimizer}, tmp_path)
    grown = Model(9)
    restored = torch.optim.Adafactor(grown.parameters())
    remesh.load({"model": grown, "optimizer": restored}, tmp_path, resize={"model.*": "keep"})
    before, now = optimizer.state[source.embed.weight], restored.state[grown.embed.weight]
    assert torch.equal(now["row_var"], torch.cat([before["row_var"], torch.zeros(3, 1)]))
    assert torch.equal(now["col_var"], before["col_var"])
    step(grown, restored)


def test_policies_by_name_come_before_patterns_and_any_dim_may_differ(tmp_path: Path) -> None:
    remesh.save({"a": torch.ones(2, 3), "b": torch.ones(2, 3), "c": torch.ones(2)}, tmp_path)
    target = {name: torch.full((3, 2), INITIAL) for name in "ab"} | {"c": torch.zeros(2)}
    remesh.load(target, tmp_path, resize={"*": "zeros", "b": "keep"})
    assert target["a"].tolist() == [[1, 1], [1, 1], [0, 0]]
    assert target["b"].tolist() == [[1, 1], [1, 1], [INITIAL, INITIAL]]
    assert target["c"].tolist() == [1, 1]


def test_a_mean_is_of_the_stored_rows_in_the_dtype_of_the_target(tmp_path: Path) -> None:
    rows = torch.tensor([1.0, 2.0, 6.0], dtype=torch.bfloat16)
    remesh.save({"w": rows, "v": rows.float()[:, None, None]}, tmp_path)
    target = {"w": torch.zeros(5), "v": torch.zeros(4, 1, 1)}
    remesh.load(target, tmp_path, cast=True, resize={"?": "mean"})
    assert target["w"].tolist() == [1, 2, 6, 3, 3]
    assert target["v"].flatten().tolist() == [1, 2, 6, 3]


def test_what_cannot_be_resized_is_refused(tmp_path: Path) -> None:
    source = trained(OLD)
    source["count"] = torch.ones(3, dtype=torch.int64)
    remesh.save(source, tmp_path)
    state = fresh(9)
    weights = [p.clone() for p in state["model"].parameters()]

    def refused(kind: Any, match: str, target: Any = state, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            remesh.load(target, tmp_path, **options)

    mismatch = remesh.MismatchError
    refused(remesh.errors.OptionError, "'keep' or 'zeros' or 'mean'", resize={"*": "random"})
    typo: Any = {"*.emb": "keep"}
    refused(remesh.errors.StateError, r"no tensor of the state: \*\.emb", trained(OLD), resize=typo)
    refused(mismatch, r"fits no tensor of this rank: \*\.emb", resize=typo)
    refused(mismatch, r'resize=\{"model.embed.weight": "zeros"\}')
    refused(mismatch, "model.head.weight: shape", resize={"model.embed.*": "keep"})
    count = {"count": torch.zeros(4, dtype=torch.int64)}
    refused(mismatch, "floating-point", count, resize={"count": "mean"})
    refused(mismatch, r"\(3,\) is stored", {"count": torch.zeros(3, 1)}, resize={"count": "keep"})
    wide = {"model": {"embed": nn.Embedding(OLD, DIM + 1)}}
    refused(mismatch, "only dim 0 may differ", wide, resize={"*": "mean"})
    # Without its parameter among what is loaded, state is still not resized unasked.
    alone = {**state, "model": LocalNonpersistentObject(state["model"])}
    refused(mismatch, "exp_avg: shape", alone)
    assert all(map(torch.equal, weights, state["model"].parameters()))
    assert not state["optimizer"].state


SIZES: list[tuple[int, Any]] = [(9, "mean"), (9, "keep"), (4, "zeros")]


def _load_sharded(exchange: Exchange, path: str, layout: str) -> list[dict[str, torch.Tensor]]:
    results = []
    for rows, policy in SIZES:
        state = fresh(rows)
        model = state["model"]
        mesh = init_device_mesh("cpu", (2,))
        if layout == "fsdp":
            fully_shard(model, mesh=mesh)
        else:
            # The rows of the embedding and the columns of the head are divided.
            parallelize_module(model, mesh, {"embed": RowwiseParallel(), "head": RowwiseParallel()})
        state["optimizer"] = torch.optim.AdamW(model.parameters(), lr=0.5)
        remesh.load(state, path, resize={"*.weight": policy}, group=exchange)
        results.append(tensors_of(state))
        if layout == "fsdp":
            step(model, state["optimizer"])
    return results


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_each_rank_resizes_its_part(layout: str, tmp_path: Path) -> None:
    source = trained(OLD)
    remesh.save(source, tmp_path)
    found = run_processes(2, _load_sharded, str(tmp_path), layout)
    for number, (rows, policy) in enumerate(SIZES):
        whole = fresh(rows)
        remesh.load(whole, tmp_path, resize={"*.weight": policy})
        wanted = tensors_of(whole)
        for results in found:
            assert all(torch.equal(results[number][name], t) for name, t in wanted.items())
