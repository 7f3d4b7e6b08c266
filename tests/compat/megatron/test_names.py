"""Every name that Megatron imports is there and does its work."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch
from torch.distributed.checkpoint.state_dict_saver import save as save_with_torch

from remesh.compat.megatron import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    install,
    load,
    save,
)
from remesh.compat.megatron.redirect import REPLACED
from remesh.compat.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from remesh.compat.megatron.strategies.tensorstore import TensorStoreLoadShardedStrategy
from remesh.compat.megatron.strategies.torch import TorchDistLoadShardedStrategy
from remesh.exchange import Exchange
from tests.compat.megatron.layouts import may_have_children, shard
from tests.compat.megatron.names import imported, missing
from tests.compat.megatron.own_tests import cuda_on_cpu
from tests.support import run_processes
from tests.support.zarr_files import write_zarr


def test_the_installed_release_imports_nothing_that_is_missing() -> None:
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))).parent
    assert "optimizer.KEEP_VARS_HINT" in imported(
        root / "megatron/core/optimizer/distrib_optimizer.py", root
    )
    assert missing(root) == {}


def test_old_arrays_are_read_by_the_strategy_that_nemo_names(tmp_path: Path) -> None:
    write_zarr({"w": np.arange(4)}, tmp_path, {})
    strategy = TensorStoreLoadShardedStrategy(load_directly_on_device=True)
    loaded = load({"w": shard("w", torch.zeros(4))}, tmp_path, strategy)
    assert loaded["w"].tolist() == [0, 1, 2, 3]


def _from_release(name: str) -> Any:
    """A file of the installed Megatron over the drop-in; only for processes of their own.

    Megatron Core itself, which takes seconds to import, and what needs a GPU are left out.
    """
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    core = ModuleType("megatron.core")
    core.__path__ = [f"{folder}/core" for folder in spec.submodule_search_locations]
    sys.modules["megatron.core"] = core
    may_have_children()  # as Megatron's writer does
    cuda_on_cpu.install()
    install()
    # As Megatron Core does; the two import each other.
    importlib.import_module("megatron.core.parallel_state")
    return importlib.import_module(f"{REPLACED}.{name}")


def _tensor_aware(exchange: Exchange) -> None:
    rank = exchange.rank
    extension: Any = ModuleType("nvidia_resiliency_ext.checkpointing.local.base_state_dict")
    extension.TensorAwareStateDict = object
    parts = extension.__name__.split(".")
    for number in range(1, len(parts)):
        name = ".".join(parts[:number])
        sys.modules[name] = ModuleType(name)
    sys.modules[extension.__name__] = extension
    release = _from_release("tensor_aware_state_dict")
    assert "site-packages" in release.__file__
    assert release.ShardedTensor is ShardedTensor
    taken_of = release.MCoreTensorAwareStateDict.from_state_dict

    def state(value: int) -> dict[str, object]:
        tensors = {
            f"w{n}": shard(f"w{n}", torch.full((4,), value + n), replica_id=rank) for n in range(3)
        }
        own = shard("own", torch.full((2,), value + rank), (0, rank, 2))
        rng = ShardedObject("rng", {"rank": rank}, (2,), (rank,))
        return {**tensors, "own": own, "rng": rng, "step": value}

    for algo in ("atomic", "fully_parallel"):
        taken, distribution = taken_of(state(5), algo=algo)
        kept = taken.pop_tensors()
        assert taken.is_hollow
        with pytest.raises(AssertionError):
            taken.pop_tensors()
        # Fully parallel, a tensor that both ranks have is kept once.
        assert (len(kept) == 4) == (algo == "atomic")
        taken.init_tensors()
        assert len(taken.pop_tensors()) == len(kept)
        taken.insert_tensors(kept)
        taken.copy_tensors_to_cpu()
        for tensor in kept:
            tensor.zero_()  # a copy is what is kept
        taken.restore_tensor_device()
        found = taken.to_state_dict(state(0), algo=algo)
        assert [found[f"w{n}"].tolist() for n in range(3)] == [[5 + n] * 4 for n in range(3)]
        assert found["own"].tolist() == [5 + rank] * 2
        assert (found["rng"], found["step"]) == ({"rank": rank}, 5)
        again, cached = taken_of(state(7), algo=algo, cached_metadata=distribution)
        assert cached == distribution
        assert again.common_state_dict == {"step": 7}
    other = shard("own", torch.zeros(1), (0, 2 * rank + 1, 4))
    for strict in ("assume_ok_unexpected", "log_all"):
        with pytest.raises(AssertionError, match="own"):
            taken.to_state_dict({"own": other}, validate_access_integrity=False, strict=strict)


def test_local_checkpoints_take_tensors_apart_and_put_them_together() -> None:
    run_processes(2, _tensor_aware)


def _shards_of_release(_: Exchange, folder: Path) -> None:
    release = _from_release("strategies.checkpointable")
    assert release.ShardedTensor is ShardedTensor

    def shards(value: float) -> Any:
        parts = [shard("w", torch.full((3,), value + n), (0, n, 2)) for n in range(2)]
        wrapped = [release.CheckpointableShardedTensor.from_sh_ten(part) for part in parts]
        return release.LocalShardsContainer(wrapped)

    save_with_torch({"w": shards(1)}, checkpoint_id=folder)
    target = shards(8)
    load_with_torch({"w": target}, checkpoint_id=folder)
    assert [one._sh_ten.data.tolist() for one in target._local_shards] == [[1.0] * 3, [2.0] * 3]


def test_shards_are_what_torch_saves(tmp_path: Path) -> None:
    run_processes(1, _shards_of_release, tmp_path)


def _lent_names(exchange: Exchange, folder: Path) -> None:
    """Names of modules that the drop-in has, which are Megatron's own; NeMo imports them."""
    release: Any = _from_release("strategies.torch")
    assert release.__name__ == "remesh.compat.megatron.strategies.torch"
    shards = [
        shard("w", torch.full((2,), n), (0, n, 4), (1, 1, 3), prepend_axis_num=1) for n in (2, 3)
    ]
    made = release.sharded_tensor_to_torch_sharded_tensor(shards)
    assert made.size() == torch.Size((4, 6))
    assert [one.metadata.shard_offsets for one in made.local_shards()] == [[2, 2], [3, 2]]
    assert [one.tensor.tolist() for one in made.local_shards()] == [[[2, 2]], [[3, 3]]]
    assert len(made.metadata().shards_metadata) == 12
    tensor = torch.arange(4)
    save({"w": shard("w", tensor, replica_id=exchange.rank)}, folder)
    for cached in (False, True):
        reader = release._get_filesystem_reader(folder, cached)
        assert set(reader.read_metadata().state_dict_metadata) == {"w"}
    # What both define is the drop-in's, for Megatron's functions too.
    lending = sys.modules[f"{REPLACED}.strategies.torch_of_release"]
    assert lending.TorchDistLoadShardedStrategy is TorchDistLoadShardedStrategy
    with pytest.raises(AttributeError, match="no attribute 'not_there'"):
        _ = release.not_there


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_names_that_the_drop_in_lacks_are_lent(tmp_path: Path) -> None:
    run_processes(2, _lent_names, tmp_path)


def _async_save_of_torch(exchange: Exchange, folder: Path) -> None:
    release = _from_release("strategies.state_dict_saver")
    writers = _from_release("strategies.filesystem_async")
    readers = _from_release("strategies.cached_metadata_filesystem_reader")
    queue = AsyncCallsQueue()

    def schedule(tensor: torch.Tensor, folder: Path, *, fails: bool = False) -> None:
        writer = writers.FileSystemWriterAsync(folder)
        planned, *_ = release.save_state_dict_async_plan(
            {"w": tensor, "step": 3}, writer, None, 0, planner=DefaultSavePlanner()
        )
        save_fn, preload_fn, args = writer.get_save_function_and_args()
        finalize = [lambda: release.save_state_dict_async_finalize(*planned)]
        if fails:
            shutil.rmtree(folder)
        queue.schedule_async_request(AsyncRequest(save_fn, args, finalize, preload_fn=preload_fn))

    tensor = torch.arange(4.0)
    schedule(tensor, folder / "one")
    tensor.zero_()  # it is staged
    queue.maybe_finalize_async_calls(blocking=True)
    loaded: dict[str, Any] = {"w": torch.zeros(4), "step": 0}
    reader = readers.CachedMetadataFileSystemReader(folder / "one")
    load_with_torch(loaded, storage_reader=reader)
    assert (loaded["w"].tolist(), loaded["step"]) == ([0.0, 1.0, 2.0, 3.0], 3)
    # A rank that cannot write fails the save everywhere.
    schedule(tensor, folder / "two", fails=exchange.rank == 0)
    with pytest.raises(CheckpointException) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    assert ("No such file" in str(caught.value)) == (exchange.rank == 0)


def test_states_of_torch_are_saved_beside_the_training(tmp_path: Path) -> None:
    run_processes(2, _async_save_of_torch, tmp_path)


class ForeignRequest(NamedTuple):
    """A request as nvidia-resiliency-ext has them."""

    async_fn: Any
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Any]
    async_fn_kwargs: Mapping[str, Any] = MappingProxyType({})
    preload_fn: Any = None
    is_frozen: bool = False
    call_idx: int = 0


def test_requests_of_other_libraries_are_scheduled() -> None:
    done: list[str] = []
    queue = AsyncCallsQueue()
    request: Any = ForeignRequest(done.append, ("written",), [lambda: done.append("finalized")])
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert done == ["written", "finalized"]
    # One that fails is finalized by its own library, which knows what to remove.
    queue.schedule_async_request(request._replace(async_fn=os.fspath, async_fn_args=(1,)))
    with pytest.raises(CheckpointingException, match="TypeError"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert done == ["written", "finalized", "finalized"]


def _foreign_failure(exchange: Exchange) -> None:
    done: list[str] = []

    def write() -> None:
        if exchange.rank == 1:
            raise OSError("no room")
        time.sleep(1)
        done.append("written")

    queue = AsyncCallsQueue()
    request: Any = ForeignRequest(write, (), [lambda: done.append("finalized")])
    queue.schedule_async_request(request)
    time.sleep(0.1)  # that rank has failed, the other still writes
    with pytest.raises(CheckpointingException, match="no room"):
        queue.maybe_finalize_async_calls()
    assert done == (["finalized"] if exchange.rank == 1 else ["written", "finalized"])


def test_a_request_of_another_library_is_cleaned_up_after_its_own_writer() -> None:
    run_processes(2, _foreign_failure)


@pytest.mark.slow
def test_megatron_core_runs_on_the_drop_in() -> None:
    """In a process of its own: the true Megatron Core imports the drop-in, by the name it knows."""
    code = (
        "from remesh.compat import megatron as drop_in\n"
        "drop_in.install()\n"
        "import megatron.core.models.gpt, megatron.core.optimizer\n"
        "from megatron.core import dist_checkpointing\n"
        "from megatron.core.optimizer import distrib_optimizer\n"
        "assert dist_checkpointing is drop_in\n"
        "assert distrib_optimizer.ShardedTensor is drop_in.ShardedTensor\n"
        "from megatron.core.dist_checkpointing.strategies.async_utils import _disable_gc\n"
        "from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
