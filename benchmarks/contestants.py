"""Who is measured: each saves and loads the same shards, described in its own way.

Every rank holds its shards of all tensors, cut along one dim into equal parts, in rank order. When
`save` returns, the bytes are durable: where a library leaves them in the page cache, its files are
synced here. `load` fills the shards in place.

`torch.save` and safetensors write what a rank holds into a file of its own and know of no other
layout. torchsnapshot and megatron-core take part where they are installed and run.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import remesh


@dataclass(frozen=True, slots=True)
class Shards:
    """What a rank holds.

    Attributes:
        data: Its shard of each tensor by name.
        dim: The dim along which all tensors are cut.
    """

    data: dict[str, torch.Tensor]
    dim: int

    def dtensors(self) -> dict[str, Any]:
        """The shards as DTensors over all ranks."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return {
            name: DTensor.from_local(data, mesh, [Shard(self.dim)], run_check=False)
            for name, data in self.data.items()
        }

    def shape_and_offset(self, data: torch.Tensor) -> tuple[list[int], list[int]]:
        """The global shape of a shard's tensor, and where the shard lies in it."""
        shape, offset = list(data.shape), [0] * data.dim()
        offset[self.dim] = shape[self.dim] * dist.get_rank()
        shape[self.dim] *= dist.get_world_size()
        return shape, offset


Action = Callable[[Shards, Path], object]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system that saves and loads.

    Attributes:
        name: What tables call it.
        save: Saves shards into a folder.
        load: Fills shards from a folder.
        reshards: Whether it loads into another layout.
    """

    name: str
    save: Action
    load: Action
    reshards: bool = True


def sync_files(folder: Path, pattern: str = "*") -> None:
    """Make files durable that a library has written and left."""
    for path in folder.rglob(pattern):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _own_file(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank-{dist.get_rank()}"


def _fill(shards: Shards, loaded: dict[str, torch.Tensor]) -> None:
    for name, data in shards.data.items():
        data.copy_(loaded[name])


def _torch_save(shards: Shards, folder: Path) -> None:
    file = _own_file(folder)
    torch.save(shards.data, file)
    sync_files(folder, file.name)


def _torch_load(shards: Shards, folder: Path) -> None:
    _fill(shards, torch.load(_own_file(folder)))


def _safetensors_save(shards: Shards, folder: Path) -> None:
    from safetensors.torch import save_file

    file = _own_file(folder)
    save_file(shards.data, file)
    sync_files(folder, file.name)


def _safetensors_load(shards: Shards, folder: Path) -> None:
    from safetensors.torch import load_file

    _fill(shards, load_file(_own_file(folder)))


def megatron() -> Any:
    """Megatron's package, which takes a GPU for granted when it saves."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    return importlib.import_module("megatron.core.dist_checkpointing")


def _for_megatron(shards: Shards) -> dict[str, Any]:
    offset = (shards.dim, dist.get_rank(), dist.get_world_size())
    make = megatron().ShardedTensor.from_rank_offsets
    return {name: make(name, data, offset) for name, data in shards.data.items()}


def _megatron_save(shards: Shards, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    megatron().save(_for_megatron(shards), str(folder))


def _for_torchsnapshot(shards: Shards) -> dict[str, Any]:
    from torch.distributed._shard.sharded_tensor import (  # what torchsnapshot reshards
        Shard as LocalShard,
    )
    from torch.distributed._shard.sharded_tensor import init_from_local_shards

    made = {}
    for name, data in shards.data.items():
        shape, offset = shards.shape_and_offset(data)
        local = LocalShard.from_tensor_and_offsets(data, offset, dist.get_rank())
        made[name] = init_from_local_shards([local], *shape)
    return {"state": importlib.import_module("torchsnapshot").StateDict(**made)}


def _torchsnapshot_save(shards: Shards, folder: Path) -> None:
    snapshot = importlib.import_module("torchsnapshot").Snapshot
    snapshot.take(str(folder), _for_torchsnapshot(shards))
    if dist.get_rank() == 0:
        sync_files(folder)
    dist.barrier()


def _torchsnapshot_load(shards: Shards, folder: Path) -> None:
    snapshot = importlib.import_module("torchsnapshot").Snapshot
    snapshot(str(folder)).restore(_for_torchsnapshot(shards))


ALL = (
    Contestant(
        "remesh",
        lambda shards, folder: remesh.save(shards.dtensors(), folder),
        lambda shards, folder: remesh.load(shards.dtensors(), folder),
    ),
    Contestant(
        "torch DCP",
        lambda shards, folder: dcp.save(shards.dtensors(), checkpoint_id=folder),
        lambda shards, folder: dcp.load(shards.dtensors(), checkpoint_id=folder),
    ),
    Contestant(
        "megatron-core",
        _megatron_save,
        lambda shards, folder: megatron().load(_for_megatron(shards), str(folder)),
    ),
    Contestant("torch.save", _torch_save, _torch_load, reshards=False),
    Contestant("safetensors", _safetensors_save, _safetensors_load, reshards=False),
    Contestant("torchsnapshot", _torchsnapshot_save, _torchsnapshot_load),
)


def that_run(folder: Path) -> list[Contestant]:
    """The contestants that can save and load a small state here. Collective."""
    warnings.filterwarnings("ignore")  # theirs, some with every tensor
    found = []
    for contestant in ALL:
        source = torch.arange(64.0).reshape(8, 8)
        target = torch.zeros(8, 8)
        place = folder / contestant.name.replace(" ", "-")
        problem = ""
        try:
            contestant.save(Shards({"x": source}, 0), place)
            dist.barrier()
            contestant.load(Shards({"x": target}, 0), place)
        except Exception as error:  # noqa: BLE001 - whatever keeps it from taking part
            problem = f"{type(error).__name__}: {error}"
        runs = torch.tensor([float(not problem and torch.equal(source, target))])
        dist.all_reduce(runs, dist.ReduceOp.MIN)
        if runs.item():
            found.append(contestant)
        elif dist.get_rank() == 0:
            print(f"without {contestant.name}: {problem or 'what it loads is wrong'}")
    return found
