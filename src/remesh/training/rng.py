"""Random number generators, kept by role and not by rank.

A training process draws from several streams: Python's `random`, numpy's global generator, torch's
on the CPU and on devices, and generators that the user made. What a process draws belongs to its
role in the job (the second data-parallel part, say), which may be another rank's after a restart.
So the states are stored as tensors of bytes over the grid of roles, one row for each role: role
`{"dp": (1, 4), "tp": (0, 2)}` owns row [1, 0] of a (4, 2, bytes) tensor for each stream. By default
the role is the rank.

If the grid has changed there is no right answer, only a documented one: each stream gets a fresh
seed, a hash of (seed, step, stream, role), see `derived_seed`. That is the idea of JAX's `fold_in`,
with a hash in place of a counter-based generator.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from remesh._repr import short_repr
from remesh.core.integrity import raw_digest
from remesh.core.sharded import ShardedTensor
from remesh.errors import StateError
from remesh.exchange import Exchange, run_on_all

ROW_BYTES = 8192
"""Bytes of a row: room for the longest state, a Mersenne Twister written as JSON."""

_LENGTH_BYTES = 4
_LOGGER = logging.getLogger("remesh")


@dataclass(frozen=True, slots=True)
class Randomness:
    """The roles, generators and seed of a job's random numbers, for a manager."""

    role: Mapping[str, tuple[int, int]] | None = None
    """Names of axes → (this process's coordinate, size): everything that decides what this process
    draws. The same axes and sizes on every rank. Ranks with one role must draw the same numbers;
    the first of them is stored, and if others differ at the first save, a warning says so. None
    for the rank as the only axis; for a device mesh see `role_in`."""
    generators: Mapping[str, object] = field(default_factory=dict)
    """The user's own generators by name: `numpy.random.Generator`, `numpy.random.RandomState`,
    `random.Random` or `torch.Generator`; the same names on every rank."""
    seed: int = 0
    """From which seeds are derived when the grid of roles has changed."""

    __repr__ = short_repr


def role_in(mesh: Any, axes: Sequence[str] | None = None) -> dict[str, tuple[int, int]]:
    """The role of this process by its coordinates in a torch `DeviceMesh`.

    Args:
        mesh: The mesh, with named axes.
        axes: Those along which ranks draw different numbers; by default all.
    """
    names = mesh.mesh_dim_names or ()
    return {
        name: (mesh.get_local_rank(name), mesh.size(number))
        for number, name in enumerate(names)
        if axes is None or name in axes
    }


# Streams ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    """A source of random numbers."""

    take: Callable[[], Any]  # a copy of its state
    encode: Callable[[Any], bytes]  # such a copy as bytes
    set: Callable[[bytes], None]  # takes over a state as bytes
    seed: Callable[[int], object]  # begins anew from a 64-bit seed

    def get(self) -> bytes:
        """Its state as bytes."""
        return self.encode(self.take())

    def frozen(self) -> Stream:
        """A stream whose state stays what it is now; encoding it is left for later."""
        taken = self.take()
        return replace(self, take=lambda: taken)


def streams_of(generators: Mapping[str, object], *, is_alone: bool) -> dict[str, Stream]:
    """The streams of this process by name.

    If the job is this process alone all devices are its own, otherwise only the current one.
    """
    found = {"python": _of_python(random), "numpy": _of_numpy_state(np.random)}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = _of_torch(torch.default_generator)
        for number, generator in enumerate(_device_generators(torch, is_alone=is_alone)):
            found[f"device_{number}"] = _of_torch(generator)
    for name, generator in generators.items():
        found[f"generators.{name}"] = _stream_of(name, generator)
    return found


def rewind_of_streams(*, is_alone: bool) -> Callable[[], None]:
    """A function that puts all streams but the user's own generators back to where they are now.

    Further calls of it do nothing.
    """
    streams = streams_of({}, is_alone=is_alone)
    states = {name: stream.get() for name, stream in streams.items()}

    def rewind() -> None:
        while states:
            name, state = states.popitem()
            streams[name].set(state)

    return rewind


def _device_generators(torch: ModuleType, *, is_alone: bool) -> list[Any]:
    """The default generators of the accelerators that this process uses."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    generators = getattr(module, "default_generators", ())
    if not generators or not module.is_initialized():
        return []
    return list(generators) if is_alone else [generators[module.current_device()]]


def _stream_of(name: str, generator: object) -> Stream:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(generator, torch.Generator):
        return _of_torch(generator)
    match generator:
        case np.random.Generator():
            return _of_numpy_generator(generator.bit_generator)
        case np.random.RandomState():
            return _of_numpy_state(generator)
        case random.Random():
            return _of_python(generator)
        case _:
            raise StateError(
                f"generator {name!r} is a {type(generator).__name__}\nGive a numpy Generator or "
                "RandomState, a random.Random or a torch.Generator"
            )


def _of_python(source: Any) -> Stream:
    def put(data: bytes) -> None:
        version, internal, gauss = json.loads(data)
        source.setstate((version, tuple(internal), gauss))

    return Stream(source.getstate, _to_json, put, source.seed)


def _of_numpy_state(source: Any) -> Stream:
    return Stream(
        lambda: source.get_state(legacy=False),
        _to_json,
        lambda data: source.set_state(json.loads(data)),
        lambda seed: source.seed([seed >> 32, seed & 0xFFFFFFFF]),
    )


def _of_numpy_generator(source: Any) -> Stream:
    def put(state: object) -> None:
        source.state = state

    return Stream(
        lambda: source.state,
        _to_json,
        lambda data: put(json.loads(data)),
        lambda seed: put(type(source)(seed).state),
    )


def _of_torch(source: Any) -> Stream:
    def put(data: bytes) -> None:
        import torch

        source.set_state(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    return Stream(source.get_state, lambda state: bytes(state.numpy()), put, source.manual_seed)


def _to_json(state: object) -> bytes:
    """A state in JSON, which has integers of any length; arrays become lists."""
    return json.dumps(state, default=lambda array: array.tolist(), separators=(",", ":")).encode()


def derived_seed(seed: int, step: int, stream: str, role: Mapping[str, tuple[int, int]]) -> int:
    """The seed of a random stream after the grid of roles has changed.

    It is the first 8 bytes, least significant first, of the BLAKE2b hash of the text
    `<seed>/<step>/<stream>/<axis>=<coordinate>:<size>,...` with axes in their order.
    """
    axes = ",".join(f"{name}={coordinate}:{size}" for name, (coordinate, size) in role.items())
    text = f"{seed}/{step}/{stream}/{axes}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


# Roles, and rows of tensors -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roles:
    """This process's role among those of the job."""

    own: Mapping[str, tuple[int, int]]  # names of axes → (coordinate, size)
    replica: int  # how many lower ranks have the same role

    @property
    def grid(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes."""
        return tuple((name, size) for name, (_, size) in self.own.items())


def agree_on_roles(exchange: Exchange, role: Mapping[str, tuple[int, int]] | None) -> Roles:
    """Compare the roles of all ranks. Collective."""
    own = dict(role) if role is not None else {"rank": (exchange.rank, exchange.world_size)}

    def check() -> bytes:
        for name, (coordinate, size) in own.items():
            if not 0 <= coordinate < size:
                raise StateError(
                    f"role {own}: coordinate {coordinate} of {name!r} is not in its "
                    f"{size}\nGive (coordinate, size)"
                )
        return msgspec.msgpack.encode([(name, *place) for name, place in own.items()])

    roles = [
        msgspec.msgpack.decode(data, type=list[tuple[str, int, int]])
        for data in run_on_all(exchange, check)
    ]
    grids = [[(name, size) for name, _, size in of_rank] for of_rank in roles]
    for rank, grid in enumerate(grids):
        if grid != grids[0]:
            raise StateError(
                f"rank {rank} has the roles {grid} and rank 0 {grids[0]}\nGive the same axes in "
                "the same order, with the same sizes, on every rank"
            )
    replica = roles[: exchange.rank].count(roles[exchange.rank])
    return Roles(own, replica)


def rows_of(
    streams: Mapping[str, Stream], roles: Roles, *, is_empty: bool = False
) -> dict[str, ShardedTensor]:
    """The tensors that hold the states of all roles, with this role's rows.

    With `is_empty` the rows are blank, to be filled by a load.
    """
    sizes = tuple(size for _, size in roles.own.values())
    offset = tuple(coordinate for coordinate, _ in roles.own.values())
    return {
        name: ShardedTensor.at_offset(
            f"manager.rng.{name}",
            _row(b"" if is_empty else stream.get(), name).reshape((1,) * len(sizes) + (ROW_BYTES,)),
            (*sizes, ROW_BYTES),
            (*offset, 0),
            replica_id=roles.replica,
        )
        for name, stream in streams.items()
    }


def summary(rows: Mapping[str, ShardedTensor], roles: Roles) -> bytes:
    """The role of this rank's random numbers, and their digests, for other ranks."""
    digests = {
        name: raw_digest(np.asarray(tensor.parts[0].data).tobytes())
        for name, tensor in rows.items()
    }
    return msgspec.msgpack.encode((roles.own, digests))


def warn_of_differences(summaries: Sequence[bytes]) -> None:
    """Warn if ranks of one role do not draw the same numbers."""
    first: dict[str, tuple[int, dict[str, bytes]]] = {}
    for rank, data in enumerate(summaries):
        role, digests = msgspec.msgpack.decode(data)
        other, expected = first.setdefault(str(role), (rank, digests))
        differing = sorted(name for name in expected if digests.get(name) != expected[name])
        if differing:
            _LOGGER.warning(
                "ranks %d and %d have the same role %s, but other random numbers\n"
                "They differ (%s): a resumed run will go on with those of rank %d on both. Seed "
                "them alike, or give the role an axis that tells these ranks apart",
                other,
                rank,
                {name: place for name, (place, _) in role.items()},
                ", ".join(differing),
                other,
            )
            return


def take_rows(streams: Mapping[str, Stream], rows: Mapping[str, ShardedTensor]) -> None:
    """Give streams the states that were loaded into their rows."""
    for name, tensor in rows.items():
        row = np.asarray(tensor.parts[0].data).reshape(-1).tobytes()
        length = int.from_bytes(row[:_LENGTH_BYTES], "little")
        try:
            streams[name].set(row[_LENGTH_BYTES : _LENGTH_BYTES + length])
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise StateError(
                f"{tensor.name}: what is stored is not a state of this generator ({error})\nGive "
                "one of the kind that was saved, or another name"
            ) from error


def _row(state: bytes, name: str) -> npt.NDArray[np.uint8]:
    if len(state) > ROW_BYTES - _LENGTH_BYTES:
        raise StateError(
            f"the state of generator {name!r} has {len(state)} bytes, and there is room for "
            f"{ROW_BYTES - _LENGTH_BYTES}\nSave it in the state, as an object with a state dict"
        )
    row = len(state).to_bytes(_LENGTH_BYTES, "little") + state
    return np.frombuffer(row.ljust(ROW_BYTES, b"\0"), np.uint8).copy()
