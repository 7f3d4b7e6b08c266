"""Slices of flattened parameters, as ZeRO-style optimizers hold them.

Such an optimizer lays its parameters one after the other into a flat buffer, perhaps with gaps that
align them and padding at the end, and gives each rank a slice of it, whatever lies there: the end
of one parameter, several whole ones, the beginning of the next. Megatron's distributed optimizer,
DeepSpeed's stages 1 and 2 and Paddle's second sharding do this for a group of parameters, FSDP1
for those of a wrapped module; DeepSpeed's stage 3 does it for each parameter alone.

What a slice is made of follows from where the parameters lie in the buffer (`FlatSpan`) and where
the slice begins. A range of a flattened tensor is a few boxes of it, each contiguous in the slice
(`remesh.core.geometry.boxes_of_flat_range`), so `flat_partition` gives for each parameter that the
slice touches a `ShardedTensor` of views of it. Gaps and padding belong to no parameter and vanish.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from remesh._repr import short_repr
from remesh.adapters.tensor_parallel import Split, shard_parts
from remesh.core.sharded import ShardedTensor, parts_at
from remesh.errors import StateError


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """The position of a parameter in a flat buffer."""

    name: str
    """The name of the parameter."""
    shape: tuple[int, ...]
    """Its shape on this rank before it was flattened."""
    offset: int
    """Its first element in the buffer."""
    splits: tuple[Split, ...] = ()
    """If it is a shard itself, how the global parameter is cut."""

    __repr__ = short_repr


def flat_partition(
    spans: Iterable[FlatSpan], flat: torch.Tensor, *, start: int
) -> tuple[ShardedTensor, ...]:
    """Describe a slice of a flat buffer. Copies are compared when it is saved.

    Args:
        spans: The parameters in the buffer. They must not overlap.
        flat: The slice: one dim.
        start: Where in the buffer it begins, in elements; it ends `len(flat)` further on.

    Returns:
        For each parameter of which the slice has elements its boxes, as views of `flat`.

    Raises:
        StateError: If spans overlap or the slice is not of one dim.
    """
    if flat.ndim != 1:
        raise StateError(f"a slice of a flat buffer has one dim, not shape {tuple(flat.shape)}")
    result, done, last = [], 0, ""
    for span in sorted(spans, key=lambda span: (span.offset, math.prod(span.shape))):
        size = math.prod(span.shape)
        if span.offset < done:
            raise StateError(
                f"{last} and {span.name} overlap in the flat buffer\n"
                f"There {last} ends at {done} and {span.name} begins at {span.offset}"
            )
        done, last = span.offset + size, span.name
        begin = max(start - span.offset, 0)
        end = min(start + flat.numel() - span.offset, size)
        if begin < end:
            here = flat.detach()[span.offset + begin - start :]
            parts = parts_at((0,) * len(span.shape), span.shape, here, (begin, end))
            result.append(shard_parts(span.name, span.shape, parts, span.splits))
    return tuple(result)
