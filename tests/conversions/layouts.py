"""The layouts of the conversion matrix, and what each rank then holds: the direct mapping.

The mapping is written as plainly as can be, and without remesh: a shard is made by cutting. What is
cut are the numbers of the elements of the whole tensor, so that a shard of numbers says for each
local element which global one it is (-1 for padding). By that a rank is filled from whole tensors,
and whole tensors are put together again from what all ranks hold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from tests.conversions.model import Chunk, Place, Shape

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Layout:
    """How a job is cut. Ranks count along tensor parallelism first, then data, then stages."""

    name: str  # its name in the matrix
    data: int = 1  # data-parallel ranks; `ep` of them share the experts
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline stages
    ep: int = 1  # expert-parallel ranks
    chunks: int = 1  # chunks of layers that a stage has
    kind: Literal["copies", "fsdp", "hsdp", "zero-parameter", "zero-flat"] = "copies"
    """What data-parallel ranks do with parameters and optimizer state: keep copies, cut rows of
    both, cut rows among pairs, or cut the optimizer's by parameter or flattened."""

    @property
    def world_size(self) -> int:
        return self.data * self.tp * self.pp

    @property
    def cuts_parameters(self) -> bool:
        return self.kind in ("fsdp", "hsdp")

    @property
    def num_row_shards(self) -> int:
        """Into how many parts the rows of a parameter are cut."""
        return 2 if self.kind == "hsdp" else self.data

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Stage, data-parallel and tensor-parallel rank."""
        return rank // self.tp // self.data, rank // self.tp % self.data, rank % self.tp

    def chunks_of(self, rank: int) -> list[int]:
        """The numbers of the chunks of a rank."""
        return list(range(self.coordinates(rank)[0], self.pp * self.chunks, self.pp))

    def layers_of(self, chunk: int, shape: Shape) -> range:
        """The layers of a chunk: the first chunks have one more, the last the one that is extra."""
        total = self.pp * self.chunks
        size, more = divmod(shape.num_layers, total)
        start = chunk * size + min(chunk, more)
        stop = start + size + (chunk < more)
        return range(start, shape.all_layers if chunk == total - 1 else stop)

    def place(self, rank: int, chunk: int, shape: Shape) -> Place:
        _, data, tp = self.coordinates(rank)
        return Place(
            tp_rank=tp,
            tp_size=self.tp,
            ep_rank=data % self.ep,
            ep_size=self.ep,
            layers=self.layers_of(chunk, shape),
            has_embedding=chunk == 0,
            has_head=chunk == self.pp * self.chunks - 1,
        )


LAYOUTS = [
    Layout("dp1"),
    Layout("dp2", data=2),
    Layout("dp4", data=4),
    Layout("fsdp2", data=2, kind="fsdp"),
    Layout("fsdp4", data=4, kind="fsdp"),
    Layout("hsdp2x2", data=4, kind="hsdp"),
    Layout("zero1-2", data=2, kind="zero-parameter"),
    Layout("zero1-4", data=4, kind="zero-parameter"),
    Layout("zero-flat-2", data=2, kind="zero-flat"),
    Layout("zero-flat-4", data=4, kind="zero-flat"),
    Layout("tp2", tp=2),
    Layout("tp4", tp=4),
    Layout("pp2", pp=2),
    Layout("pp4", pp=4),
    Layout("vpp2x2", pp=2, chunks=2),
    Layout("ep2", data=2, ep=2),
    Layout("tp2.dp2", tp=2, data=2),
    Layout("tp2.pp2", tp=2, pp=2),
    Layout("tp2.ep2", tp=2, data=2, ep=2),
    Layout("fsdp2.tp2", data=2, tp=2, kind="fsdp"),
]
BY_NAME = {layout.name: layout for layout in LAYOUTS}

TRAINED = [
    ("dp1", "tp4"),
    ("fsdp4", "tp2.ep2"),
    ("zero-flat-4", "vpp2x2"),
]
"""Pairs that real processes train in, in the default run."""

TRAINED_IF_SLOW = [
    ("dp2", "dp4"),
    ("fsdp2", "zero1-4"),
    ("hsdp2x2", "tp2.pp2"),
    ("zero1-2", "fsdp4"),
    ("zero1-4", "ep2"),
    ("zero-flat-2", "zero-flat-4"),
    ("fsdp2.tp2", "pp4"),
    ("tp2", "pp2"),
    ("vpp2x2", "tp2.dp2"),
]
"""Those with which every layout is trained in: each goes there and back."""

TRAINED_NIGHTLY = [
    ("dp4", "fsdp2"),
    ("zero-flat-4", "fsdp2.tp2"),
    ("tp4", "hsdp2x2"),
    ("pp2", "pp4"),
    ("pp4", "fsdp4"),
    ("ep2", "zero-flat-2"),
    ("tp2.dp2", "dp1"),
    ("tp2.pp2", "zero1-2"),
]
"""The others, so that every layout is saved once and loaded once."""


def global_name(name: str, chunk: Chunk) -> str:
    """What a tensor of a chunk is called in the whole model."""
    first, *rest = name.split(".")
    if first == "layers":
        rest[0] = str(chunk.place.layers[int(rest[0])])
        if rest[1:3] == ["mixture", "experts"]:
            first_expert = chunk.place.ep_rank * chunk.shape.num_experts // chunk.place.ep_size
            rest[3] = str(first_expert + int(rest[3]))
    elif first == "head" and chunk.shape.tied:
        first = "embedding"
    return ".".join([first, *rest])


@functools.cache  # every rank of every job asks for it
def whole_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the whole model, tied ones once."""
    chunk = Chunk(shape, LAYOUTS[0].place(0, 0, shape))
    tensors = [*chunk.named_parameters(), *chunk.named_buffers()]
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def numbers_of_shard(name: str, whole: tuple[int, ...], shape: Shape, place: Place) -> torch.Tensor:
    """For each element of a tensor-parallel shard its number in the whole tensor."""
    numbers = torch.arange(math.prod(whole)).view(whole)
    rank, size = place.tp_rank, place.tp_size
    if "qkv" in name:
        kv = shape.num_kv_heads * shape.head_size
        query, key, value = torch.split(numbers, [shape.num_heads * shape.head_size, kv, kv])
        num_cuts = min(size, shape.num_kv_heads)
        cut = rank * num_cuts // size
        return torch.cat(
            [query.chunk(size)[rank], key.chunk(num_cuts)[cut], value.chunk(num_cuts)[cut]]
        )
    if "gate_up" in name:
        return torch.cat([half.chunk(size)[rank] for half in numbers.chunk(2)])
    if "out.weight" in name or "down.weight" in name:
        return numbers.chunk(size, 1)[rank]
    if name in ("embedding.weight", "head.weight"):
        rows = -(-whole[0] // size)
        padded = functional.pad(numbers, (0, 0, 0, rows * size - whole[0]), value=-1)
        return padded[rank * rows : (rank + 1) * rows]
    return numbers


def numbers_of_rows(numbers: torch.Tensor, rank: int, num_ranks: int) -> torch.Tensor:
    """Those of the rows that a rank has, as FSDP cuts them."""
    cut = numbers.chunk(num_ranks)
    return cut[rank] if rank < len(cut) else numbers[:0]


@dataclass(frozen=True)
class Held:
    key: str  # what of: a tensor of the model, or of the state of a parameter
    elements: torch.Tensor  # the memory, one dim
    numbers: torch.Tensor  # for each the number of the global element, or -1

    def fill(self, whole: torch.Tensor) -> None:
        real = self.numbers >= 0
        with torch.no_grad():
            self.elements[real] = whole[self.numbers[real]]


def put_together(
    ranks: Iterable[Iterable[Held]], like: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The whole tensors that some ranks hold, bit for bit.

    Raises:
        AssertionError: If an element is held by nobody, or copies differ.
    """
    whole = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
    seen = {key: torch.zeros(len(tensor), dtype=torch.bool) for key, tensor in like.items()}
    for rank, held in enumerate(ranks):
        for one in held:
            real = one.numbers >= 0
            numbers, elements = one.numbers[real], one.elements.detach()[real]
            known = seen[one.key][numbers]
            same = whole[one.key][numbers][known] == elements[known]
            assert elements.dtype == like[one.key].dtype, one.key
            assert same.all(), f"{one.key}: rank {rank} has another copy"
            whole[one.key][numbers] = elements
            seen[one.key][numbers] = True
    holes = [key for key, found in seen.items() if not found.all()]
    assert not holes, f"no rank holds all of {holes}"
    return whole


def random_state(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    """Whole tensors of a training state by key, flattened, with random contents."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, extents in whole_shapes(shape).items():
        size = math.prod(extents)
        values = torch.randn(size, generator=generator)
        is_buffer = name.endswith("router_bias")
        state[f"model.{name}"] = values if is_buffer else values.bfloat16()
        if not is_buffer:
            for kind in (MASTER, *MOMENTS):
                state[f"{name}.{kind}"] = torch.randn(size, generator=generator)
            state[f"{name}.step"] = torch.tensor([3.0])
    return state
