"""The last step of a training: whether its state is still the same, and which manager is in charge.

Whether a state has changed is seen from fingerprints of its tensors (`fingerprints`), which cost no
copy, and from its plain values. Arrays of numpy are compared by a digest.

In one process one manager at a time saves to a root. In a notebook, a cell that is run again or
interrupted leaves a manager that was never closed; the next manager of that root closes it.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from remesh.core.integrity import hex_digest
from remesh.core.sharded import ShardedTensor
from remesh.exchange import Exchange, run_on_all

if TYPE_CHECKING:
    from remesh.training.fingerprints import Fingerprint
    from remesh.training.manager import Manager

_LOGGER = logging.getLogger("remesh")

_Place = tuple[str, int, int]
_OPEN: weakref.WeakValueDictionary[_Place, Manager] = weakref.WeakValueDictionary()
"""The managers of this process that are not closed, by root, rank and number of ranks."""


def take_charge(manager: Manager, url: str, exchange: Exchange) -> None:
    """Close an older manager of this root that was abandoned. Not collective."""
    place = url, exchange.rank, exchange.world_size
    older = _OPEN.get(place)
    if older is not None:
        _LOGGER.warning("an earlier Manager of %s was not closed; it is closed now", url)
        older.abandon("was replaced by a later Manager of the same root")
    _OPEN[place] = manager


def leave(manager: Manager) -> None:
    """Forget a manager that is closed."""
    for place, other in [*_OPEN.items()]:
        if other is manager:
            del _OPEN[place]


@dataclass(frozen=True, slots=True)
class LastStep:
    """The arguments of the last call of `Manager.step`."""

    step: int
    state: Any  # the user's state
    metrics: Mapping[str, float] | None
    fingerprint: Fingerprint | None  # of the state at that moment; None without torch

    def change(self) -> str:
        """The part of the state that was changed since; empty if none was."""
        return "" if self.fingerprint is None else self.fingerprint.changed(self.state)


def is_wanted(exchange: Exchange, last: LastStep | None, is_periodic: bool) -> bool:
    """True if the last step is to be saved at the end. Collective.

    `last` is the last step of this rank; None if a save of it was begun.
    """

    def look() -> bytes:
        if last is None:
            return b""
        return f"{last.step} {int(is_periodic)} {last.change()}".encode(errors="replace")

    replies = [reply.decode().split(" ", 2) for reply in run_on_all(exchange, look)]
    if not all(len(reply) == 3 for reply in replies):
        return False
    if not any(periodic == "1" for _, periodic, _ in replies):
        return False
    changes = [(rank, change) for rank, (_, _, change) in enumerate(replies) if change]
    if not changes:
        return len({step for step, _, _ in replies}) == 1
    if exchange.rank == 0:
        _LOGGER.warning(
            "step %s is not saved at the end: the state has changed since\n"
            "Rank %d changed %s. Call Manager.step after each step, and after its last change",
            replies[0][0],
            *changes[0],
        )
    return False


def digest_of_state(state: Any) -> str:
    """A text that changes when any tensor, array or plain value of a state changes."""
    tensors: list[Any] = []
    facts = "\n".join(_facts(state, "", tensors))
    if tensors:
        from remesh.training.fingerprints import Fingerprints

        facts += Fingerprints().take_of(tensors).digest()
    return hex_digest(facts.encode(errors="surrogatepass"))


def _facts(value: Any, name: str, tensors: list[Any]) -> Iterator[str]:
    """All but the tensors, which are collected."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensors.append(value)
        yield name
    elif torch is not None and isinstance(value, torch.Generator):
        yield f"{name} {hex_digest(value.get_state().numpy().tobytes())}"
    elif torch is not None and isinstance(value, torch.nn.Module):
        for key, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield from _facts(tensor, f"{name}.{key}", tensors)
    elif isinstance(value, np.ndarray):
        yield f"{name} {value.shape} {hex_digest(np.ascontiguousarray(value).tobytes())}"
    elif isinstance(value, ShardedTensor):
        for number, part in enumerate(value.parts):
            yield from _facts(part.data, f"{name}.{number}", tensors)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _facts(item, f"{name}.{key}", tensors)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _facts(item, f"{name}.{number}", tensors)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        yield from _facts(value.state_dict(), name, tensors)
    else:
        yield f"{name} {value!r}"
