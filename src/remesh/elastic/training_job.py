"""The job as a training function sees it that can be entered again.

`remesh.elastic.run` calls the function with a `TrainingJob`, the same in all entries of a process.
It holds what the entries share: what the user keeps, and the *boundary* that the manager of an
entry leaves to the next one (`remesh.training.survivors`). It also knows when the function must not
be interrupted: while tensors are being changed, which ends at the next boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from remesh.errors import WorldChangedError

__all__ = ["TrainingJob"]

T = TypeVar("T")


class TrainingJob:
    """The state that all calls of a training function share.

    Attributes:
        entries: How often the function was entered before in this process.
        is_reentrant: Whether the function is entered again when the world changes.
        boundary: What the manager knew at the last step boundary; for the next manager.
        is_changing: Whether tensors are being changed: not interrupted if that ends soon.
        must_leave: Whether the function has to be left.
        is_aborted: Whether the collectives of this world were aborted: what devices had still to
            compute is not right.
    """

    def __init__(self, *, is_reentrant: bool = False) -> None:
        self.entries = 0
        self.is_reentrant = is_reentrant
        self.boundary: Any = None
        self.is_changing = False
        self.must_leave = False
        self.is_aborted = False
        self._kept: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value that `make` returns, made once in this process.

        Keep what is expensive to make and does not belong to one world: data, tokenizers, open
        files. Models, optimizers, process groups and device meshes are made anew in each entry.

        Args:
            key: Names it.
            make: Makes it in the first entry.
        """
        if key not in self._kept:
            self._kept[key] = make()
        value: T = self._kept[key]
        return value

    def make_room(self) -> None:
        """See to it that the state of the last entry leaves room for that of the next one."""
        if self.boundary is not None and not self.boundary.make_room():
            self.boundary = None

    def end_change(self) -> None:
        """No tensor is being changed.

        Raises:
            WorldChangedError: If the function has to be left.
        """
        self.is_changing = False
        if self.must_leave:
            raise WorldChangedError("the world of the job changes")
