"""One rank of a training job in a layout: what it holds, what it saves, how it trains.

Parameters are bfloat16 and the optimizer works on fp32 master copies of them.

Without processes a job cannot train, but it holds and saves the same; then parameters whose rows
are cut are flat slices here where they are DTensors in a real job.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import remesh
from remesh.adapters import DescribedOptimizer, FlatSpan, NamedModule, flat_partition
from remesh.checkpoint import RestoreReport
from tests.conversions.layouts import (
    MASTER,
    MOMENTS,
    Held,
    Layout,
    global_name,
    numbers_of_rows,
    numbers_of_shard,
    whole_shapes,
)
from tests.conversions.model import Chunk, Cut, Shape

ALIGNMENT = 4
"""Parameters begin at multiples of this in a flat buffer."""


@dataclass(frozen=True)
class Group:
    """The processes of a job, and those that cut rows of parameters; None if none do."""

    ranks: dist.ProcessGroup
    mesh: DeviceMesh | None

    @classmethod
    def of(cls, layout: Layout) -> Group:
        """Make the groups of a job, which all processes do together."""
        ranks = torch.arange(layout.world_size)
        mesh = None
        if layout.kind == "fsdp":
            mesh = DeviceMesh("cpu", ranks.view(-1, layout.tp), mesh_dim_names=("fsdp", "tp"))
        elif layout.kind == "hsdp":
            mesh = DeviceMesh("cpu", ranks.view(-1, 2), mesh_dim_names=("replicate", "shard"))
        return cls(dist.new_group(ranks.tolist()), mesh)


@dataclass(eq=False)
class Local:
    """A parameter of a rank under its global name."""

    name: str  # the global name
    parameter: torch.Tensor  # what is in the module: a tensor, or a DTensor
    numbers: torch.Tensor  # of the elements of this rank's shard, before rows are cut
    splits: tuple[Any, ...]  # how remesh is told of the shard


@dataclass(eq=False)
class Slot:
    """A tensor of the optimizer and what its stretches are of: name, start, numbers."""

    tensor: torch.Tensor
    stretches: list[tuple[str, int, torch.Tensor]]


@dataclass(eq=False)
class Job:
    """One rank of a job; `group` only in a job that trains."""

    layout: Layout
    shape: Shape
    rank: int
    group: Group | None = None
    step: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)
    chunks: dict[int, Chunk] = field(init=False)
    module: nn.Module = field(init=False)
    locals: list[Local] = field(init=False)
    slots: list[Slot] = field(init=False)
    offsets: list[int] = field(init=False)
    optimizer: DescribedOptimizer = field(init=False)
    report: RestoreReport | None = field(default=None, init=False)  # of the last load

    def __post_init__(self) -> None:
        self.generator.manual_seed(100 + self.step)
        self.chunks = {number: self._chunk(number) for number in self.layout.chunks_of(self.rank)}
        only = len(self.chunks) == 1 and self.layout.pp == 1
        self.module = self.chunks[0] if only else nn.ModuleList(self.chunks.values())
        wholes = whole_shapes(self.shape)
        self.locals = []
        for chunk in self.chunks.values():
            for name, parameter in chunk.named_parameters():
                known = global_name(name, chunk)
                owner = chunk.get_submodule(name.rpartition(".")[0])
                cuts = owner.splits if isinstance(owner, Cut) else {}
                split = cuts.get(name.rpartition(".")[2])
                numbers = numbers_of_shard(known, wholes[known], self.shape, chunk.place)
                assert numbers.shape == parameter.shape
                splits = () if split is None else (split,)
                self.locals.append(Local(known, parameter, numbers, splits))
        if self.layout.cuts_parameters:
            self._cut_rows()
        self._make_optimizer()

    def _chunk(self, number: int) -> Chunk:
        chunk = Chunk(self.shape, self.layout.place(self.rank, number, self.shape))
        for parameter in chunk.parameters():
            parameter.data = parameter.data.bfloat16()
        return chunk

    # -- rows of parameters, optimizer -----------------------------------------------------------

    @property
    def num_owners(self) -> int:
        """How many ranks share the optimizer state of what they all have."""
        return self.layout.data // self.layout.ep

    @property
    def owner(self) -> int:
        """The number of this rank among them."""
        return self.layout.coordinates(self.rank)[1] // self.layout.ep

    @property
    def _row_shard(self) -> int:
        return self.layout.coordinates(self.rank)[1] % self.layout.num_row_shards

    def own_numbers(self, local: Local) -> torch.Tensor:
        """Of the elements of a parameter that this rank keeps."""
        if not self.layout.cuts_parameters:
            return local.numbers.flatten()
        rows = numbers_of_rows(local.numbers, self._row_shard, self.layout.num_row_shards)
        return rows.flatten()

    def _cut_rows(self) -> None:
        if self.group is None:
            for local in self.locals:
                size = self.own_numbers(local).numel()
                local.parameter = torch.zeros(size, dtype=torch.bfloat16)
            return
        assert self.group.mesh is not None
        mesh = self.group.mesh["fsdp"] if self.layout.kind == "fsdp" else self.group.mesh
        (chunk,) = self.chunks.values()
        for part in (*chunk.layers, chunk):
            fully_shard(part, mesh=mesh)
        for local, parameter in zip(self.locals, chunk.parameters(), strict=True):
            local.parameter = parameter

    def _slice(self, local: Local, flat: torch.Tensor) -> Any:
        """Describe a flat slice of the rows of a parameter."""
        shape = tuple(local.numbers.shape)
        shards = self.layout.num_row_shards
        start = min(self._row_shard * -(-shape[0] // shards), shape[0]) * math.prod(shape[1:])
        return flat_partition([FlatSpan(local.name, shape, 0, local.splits)], flat, start=start)

    def _make_optimizer(self) -> None:
        layout = self.layout
        if layout.kind == "zero-flat":
            self._make_flat_optimizer()
            return
        self.slots = []
        meant: dict[torch.Tensor, Any] = {}
        for number, local in enumerate(self.locals):
            if layout.kind == "zero-parameter" and number % self.num_owners != self.owner:
                continue
            master = nn.Parameter(local.parameter.detach().float())
            self.slots.append(Slot(master, [(local.name, 0, self.own_numbers(local))]))
            by_hand = layout.cuts_parameters and self.group is None
            meant[master] = self._slice(local, master) if by_hand else local.parameter
        optimizer = torch.optim.AdamW(meant, lr=3e-3)
        self.optimizer = DescribedOptimizer(optimizer, meant, own_key=MASTER)

    def _make_flat_optimizer(self) -> None:
        spans, end = [], 0
        for local in self.locals:
            shape = tuple(local.numbers.shape)
            spans.append(FlatSpan(local.name, shape, end, local.splits))
            end += -(-local.numbers.numel() // ALIGNMENT) * ALIGNMENT
        size = -(-end // self.num_owners)
        begin = self.owner * size
        flat = nn.Parameter(torch.zeros(size))
        stretches = []
        for span, local in zip(spans, self.locals, strict=True):
            own = local.numbers.flatten()
            first, last = max(span.offset, begin), min(span.offset + len(own), begin + size)
            if first < last:
                part = own[first - span.offset : last - span.offset]
                stretches.append((span.name, first - begin, part))
        self.offsets = [span.offset for span in spans]
        self.slots = [Slot(flat, stretches)]
        parts = flat_partition(spans, flat, start=begin)
        optimizer = torch.optim.AdamW([flat], lr=3e-3)
        self.optimizer = DescribedOptimizer(optimizer, {flat: parts}, own_key=MASTER)

    # -- what it holds ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What is saved, or loaded into."""
        return {
            "model": self._model_state(),
            "optimizer": self.optimizer,
            "random": self.generator,
            "step": self.step,
        }

    def _model_state(self) -> Any:
        if self.layout.cuts_parameters and self.group is None:
            shards = {}
            for local in self.locals:
                assert isinstance(local.parameter, torch.Tensor)
                for one in self._slice(local, local.parameter):
                    name = f"model.{one.name}"
                    shards[one.name] = dataclasses.replace(one, name=name)
            for name, buffer in self.module.named_buffers():
                shards[name] = remesh.ShardedTensor.whole(f"model.{name}", buffer, replica_id=None)
            return shards
        if isinstance(self.module, Chunk):
            return self.module
        names = {}
        for position, chunk in enumerate(self.chunks.values()):
            names[str(position)] = ""
            for number, layer in enumerate(chunk.place.layers):
                names[f"{position}.layers.{number}"] = f"layers.{layer}"
            if self.shape.tied and not chunk.embeds:
                names[f"{position}.head"] = "embedding"
        return NamedModule(self.module, names)

    def held(self, *, moments: bool = True) -> list[Held]:
        """All elements that this rank holds, by what they are of."""
        found = []
        for local in self.locals:
            elements = memory(local.parameter)
            found.append(Held(f"model.{local.name}", elements, self.own_numbers(local)))
        for chunk in self.chunks.values():
            for name, buffer in chunk.named_buffers():
                key = f"model.{global_name(name, chunk)}"
                found.append(Held(key, buffer, torch.arange(buffer.numel())))
        for slot in self.slots:
            if not memory(slot.tensor).numel():
                continue  # a rank without rows of a parameter has no state of it either
            tensors = {MASTER: slot.tensor}
            if moments:
                state = self.optimizer.optimizer.state[slot.tensor]
                tensors |= {kind: state[kind] for kind in MOMENTS}
            for name, start, numbers in slot.stretches:
                for kind, tensor in tensors.items():
                    elements = memory(tensor)[start : start + len(numbers)]
                    found.append(Held(f"{name}.{kind}", elements, numbers))
                if moments:
                    step = state["step"].view(1)
                    found.append(Held(f"{name}.step", step, torch.zeros(1).long()))
        return found

    def fill(self, whole: dict[str, torch.Tensor]) -> None:
        """Take over whole tensors, without remesh."""
        for slot in self.slots:
            like = slot.tensor.detach()
            self.optimizer.optimizer.state[slot.tensor] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(like),
                "exp_avg_sq": torch.zeros_like(like),
            }
        for one in self.held():
            one.fill(whole[one.key])


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor, in one dim."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().view(-1)
