"""What ranks say to each other in a forward and a backward pass, as functions that autograd knows.

A `Link` is one rank's end of a process group: tensor-parallel ranks, expert-parallel ranks. Without
a group, or alone in one, its functions return what they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Change = Callable[[torch.Tensor], torch.Tensor]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Change, back: Change) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


@dataclass(frozen=True)
class Link:
    """A rank's end of a process group; None if there is none."""

    group: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; no part of the graph."""
        if self.size > 1:
            x = x.contiguous().clone()
            dist.all_reduce(x, group=self.group)
        return x

    def all_of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """What each rank has; no part of the graph."""
        if self.size == 1:
            return [x]
        found = [torch.empty_like(x.contiguous()) for _ in range(self.size)]
        dist.all_gather(found, x.contiguous(), group=self.group)
        return found

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        """The same on all ranks, each of which makes something else of it."""
        return self._apply(x, lambda x: x.clone(), self.summed)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks have, which all go on with in the same way."""
        return self._apply(x, self.summed, lambda x: x)

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The last dims of all ranks side by side, with which all go on in the same way."""
        return self._apply(
            x, lambda x: torch.cat(self.all_of(x), -1), lambda g: g.chunk(self.size, -1)[self.rank]
        )

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, of which each rank makes something else."""
        return self._apply(
            x,
            lambda x: torch.cat(self.all_of(x)),
            lambda g: self.summed(g).chunk(self.size)[self.rank],
        )

    def scatter_rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum of what the ranks have."""
        return self._apply(
            x,
            lambda x: self.summed(x).chunk(self.size)[self.rank],
            lambda g: torch.cat(self.all_of(g)),
        )

    def _apply(self, x: torch.Tensor, there: Change, back: Change) -> torch.Tensor:
        if self.size == 1:
            return x
        result: torch.Tensor = _Function.apply(x, there, back)  # type: ignore[no-untyped-call]
        return result
