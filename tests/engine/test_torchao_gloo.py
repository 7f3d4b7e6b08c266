"""Tensors that are made of others, in shards: in layouts that fit them, and in those that do not.

The ranks play one job, since each of their processes takes seconds to import torchao.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import remesh
from remesh.errors import MismatchError, RemeshError
from remesh.exchange import Exchange
from tests.adapters import torchao_jobs as jobs
from tests.adapters.test_wrapper_subclasses import Scaled
from tests.support import run_processes
from tests.support.torch_versions import needs

pytestmark = needs("torchao")

Facts = dict[str, Any]


def model(*, shape: tuple[int, int] = (128, 64), seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))


def placed(mesh: DeviceMesh, placement: Placement, **options: Any) -> nn.Module:
    made = model(**options)
    weight = distribute_tensor(made[0].weight.detach(), mesh, [placement])  # type: ignore[index]
    made[0].weight = nn.Parameter(weight)  # type: ignore[index]
    return made


def step(module: nn.Module, optimizer: Any) -> None:
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


def job(module: nn.Module, name: str, steps: int = 0) -> dict[str, Any]:
    optimizer = jobs.optimizer(name, module)
    for _ in range(steps):
        step(module, optimizer)
    return {"model": module, "optimizer": optimizer}


def problem_of(action: Callable[[], object]) -> str:
    try:
        action()
    except RemeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------------------------------------
# The job of the ranks
# ---------------------------------------------------------------------------------------------


def play(_exchange: Exchange, root: Path) -> Facts:
    mesh = init_device_mesh("cpu", (2,))
    for name in jobs.LOW_BIT:
        rows = model(seed=1)
        fully_shard(rows, mesh=mesh)
        state = job(rows, name)
        remesh.load(state, root / f"{name}-whole")
        remesh.save(state, root / f"{name}-rows")
    return {
        "columns": columns(mesh, root),
        "uneven": [uneven(mesh, root, num_rows) for num_rows in (3, 1)],
        "mixed": mixed(mesh, root),
        "float8": float8(mesh, root),
        "by hand": by_hand(mesh, root),
    }


def columns(mesh: DeviceMesh, root: Path) -> Facts:
    """Shards whose blocks are not those of the whole tensor."""
    source = job(placed(mesh, Shard(1)), "AdamW4bit", 2)
    target = job(placed(mesh, Shard(1), seed=1), "AdamW4bit")
    remesh.save(source, root / "columns")
    remesh.load(target, root / "columns")
    same = jobs.states(target["optimizer"]) == jobs.states(source["optimizer"])
    rows = job(placed(mesh, Shard(0), seed=1), "AdamW4bit")
    return {"same": same, "as rows": problem_of(lambda: remesh.load(rows, root / "columns"))}


def uneven(mesh: DeviceMesh, root: Path, num_rows: int) -> bool:
    """Shards of two rows and of one; of one row and of none."""
    path = root / f"uneven-{num_rows}"
    source = job(placed(mesh, Shard(0), shape=(num_rows, 4096)), "AdamW8bit", 1)
    target = job(placed(mesh, Shard(0), shape=(num_rows, 4096), seed=1), "AdamW8bit")
    remesh.save(source, path)
    remesh.load(target, path)
    return jobs.states(target["optimizer"]) == jobs.states(source["optimizer"])


def mixed(mesh: DeviceMesh, root: Path) -> str:
    """One shard has enough elements for a state of few bits, the other has not."""
    state = job(placed(mesh, Shard(0), shape=(3, 2048)), "AdamW8bit", 1)
    return problem_of(lambda: remesh.save(state, root / "mixed"))


def float8(mesh: DeviceMesh, root: Path) -> Facts:
    def sharded(seed: int) -> Any:
        module = jobs.float8(seed)
        fully_shard(module, mesh=mesh)
        return module

    source, target = job(sharded(0), "AdamW", 1), job(sharded(1), "AdamW")
    wrapper = source["model"][0].weight.to_local()
    remesh.save(source, root / "float8")
    target["model"][0].weight._local_tensor._precomputed_scale = torch.tensor(3.0)
    remesh.load(target, root / "float8")
    loaded = target["model"][0].weight._local_tensor
    return {
        "class": type(wrapper).__name__,
        "same": torch.equal(loaded._tensor, wrapper._tensor),
        "scale": loaded._precomputed_scale,
        "moments": jobs.states(target["optimizer"]) == jobs.states(source["optimizer"]),
        "local": jobs.bytes_of(wrapper._tensor),
    }


def dtensor(mesh: DeviceMesh, local: Scaled, placement: Shard) -> DTensor:
    shape = list(local.shape)
    shape[placement.dim] *= 2
    meta = TensorMeta(torch.Size(shape), (shape[1], 1), local.dtype)
    make: Any = DTensor
    made: DTensor = make(local, DTensorSpec(mesh, (placement,), meta), requires_grad=False)
    return made


def by_hand(mesh: DeviceMesh, root: Path) -> Facts:
    """Inner tensors that have the shape of the shard, and some that have not."""
    rank = mesh.get_rank()
    codes = torch.arange(6, dtype=torch.int8).reshape(2, 3) + 6 * rank
    like = codes.float() / 2
    zeros = torch.zeros_like(codes)
    found: Facts = {}
    for name, scale in (("elementwise", like), ("own", torch.tensor(rank + 1.0))):
        source = dtensor(mesh, Scaled(codes, scale), Shard(0))
        local = Scaled(zeros.clone(), torch.zeros_like(scale))
        remesh.save({"w": source}, root / name)
        remesh.load({"w": dtensor(mesh, local, Shard(0))}, root / name)
        found[name] = torch.equal(local.codes, codes) and torch.equal(local.scale, scale)
    other = Scaled(zeros.reshape(3, 2), torch.tensor(0.0))
    wrong = {"w": dtensor(mesh, other, Shard(1))}
    found["refused"] = problem_of(lambda: remesh.load(wrong, root / "own"))
    return found


# ---------------------------------------------------------------------------------------------
# What came of it
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Facts]]:
    root = tmp_path_factory.mktemp("torchao")
    for name in jobs.LOW_BIT:
        remesh.save(job(model(), name, 2), root / f"{name}-whole")
    return root, run_processes(2, play, root, timeout=280)


@pytest.mark.parametrize("name", jobs.LOW_BIT)
def test_states_of_whole_blocks_are_resharded(name: str, played: tuple[Path, Any]) -> None:
    root, _ = played
    target = job(model(seed=1), name)
    remesh.load(target, root / f"{name}-rows")
    assert jobs.states(target["optimizer"]) == jobs.states(job(model(), name, 2)["optimizer"])


def test_states_of_other_blocks_keep_their_layout(played: tuple[Path, list[Facts]]) -> None:
    root, facts = played
    assert [one["columns"]["same"] for one in facts] == [True, True]
    for one in facts:
        assert "MismatchError" in one["columns"]["as rows"]
        assert (
            "layout [['Sharded(dim=1)', 2]] is stored, None is wanted"
            in (one["columns"]["as rows"])
        )
    target = job(model(seed=1), "AdamW4bit")
    with pytest.raises(MismatchError, match=r"layout \[\['Sharded\(dim=1\)', 2\]\] is stored"):
        remesh.load(target, root / "columns")


def test_shards_of_different_sizes(played: tuple[Path, list[Facts]]) -> None:
    assert [one["uneven"] for one in played[1]] == [[True, True]] * 2


def test_a_tensor_that_only_some_ranks_quantise_is_refused(
    played: tuple[Path, list[Facts]],
) -> None:
    root, facts = played
    for one in facts:
        assert "optimizer.state.0.weight.exp_avg" in one["mixed"], one["mixed"]
    assert not (root / "mixed" / "remesh.json").exists()


def test_float8_training_with_fsdp2(played: tuple[Path, list[Facts]]) -> None:
    root, facts = played
    for one in facts:
        assert one["float8"]["class"] == "WeightWithDynamicFloat8CastTensor"
        assert one["float8"]["same"]
        assert one["float8"]["scale"] is None
        assert one["float8"]["moments"]
    plain: Any = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    target = job(plain, "AdamW")
    remesh.load(target, root / "float8")
    assert jobs.bytes_of(plain[0].weight) == b"".join(one["float8"]["local"] for one in facts)


def test_shards_made_of_other_tensors(played: tuple[Path, list[Facts]]) -> None:
    root, facts = played
    for one in facts:
        assert one["by hand"]["elementwise"]
        assert one["by hand"]["own"]
        assert (
            "layout [['Sharded(dim=0)', 2]] is stored, [['Sharded(dim=1)', 2]] is wanted"
            in (one["by hand"]["refused"])
        )
    whole = Scaled(torch.zeros(4, 3, dtype=torch.int8), torch.zeros(4, 3))
    remesh.load({"w": whole}, root / "elementwise")
    assert whole.codes.flatten().tolist() == list(range(12))
    checkpoint = remesh.Checkpoint(root / "own")
    assert checkpoint.index["w.codes"].shape == (2, 2, 3)
    assert checkpoint.state()["w"]["scale"].tolist() == [1.0, 2.0]
