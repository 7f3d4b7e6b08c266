"""`save_state_dict` and `load_state_dict`: numbered checkpoints in one directory.

Flex Checkpoint keeps several checkpoints in a directory and tells them apart by a number, the
`unique_id`. Here each of them is a checkpoint of remesh in a directory of its own below that one,
`<path>/<unique_id>`, and exists completely or not at all. Without a number, saving takes the next
free one and loading the last committed one.

Directories that Paddle itself has written are loaded as they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from remesh import catalog
from remesh.background import Saver
from remesh.checkpoint import load, save
from remesh.checkpoint.local import exchange_of
from remesh.compat.flex_checkpoint.files import compatible_names
from remesh.compat.flex_checkpoint.options import check_coordinator, transform_of
from remesh.compat.flex_checkpoint.shards import engine_state
from remesh.compat.flex_checkpoint.weights import is_sharded_state_dict
from remesh.errors import CheckpointNotFoundError, StateError
from remesh.exchange import Exchange, run_on_one
from remesh.formats import paddle
from remesh.storage import Storage, open_storage


def save_state_dict(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    async_save: bool = False,
) -> None:
    """Save a state dict as a numbered checkpoint. Collective.

    It holds `ShardedWeight`s by name, or whatever `remesh.save` takes. A checkpoint of the number
    `unique_id` is replaced; by default it is the number after the last. `process_group` is a torch
    process group or an `Exchange`; by default torch's default group, or this process alone. Which
    of its ranks `coordinator_rank` is makes no difference. With `async_save` this returns as soon
    as the state may change again; what fails in the background is raised by the next save in this
    group, or by `clear_async_save_task_queue`.
    """
    exchange = exchange_of(process_group)
    check_coordinator(exchange, coordinator_rank)
    saver = _SAVERS.get(process_group) if async_save else None
    if saver is None:
        clear_async_save_task_queue(process_group)
    else:
        saver.wait()
    number = _next_number(exchange, path) if unique_id is None else _checked(unique_id)
    state = _state_of(state_dict, {})
    place, overwrite = _place(path, number), unique_id is not None
    if async_save:
        saver = saver or _SAVERS.setdefault(process_group, Saver(group=process_group))
        saver.save_async(state, place, overwrite=overwrite)
    else:
        save(state, place, overwrite=overwrite, group=exchange)


_SAVERS: dict[Any, Saver] = {}
"""What asynchronous saves of a group have in common until its queue is cleared: plan, host memory,
and the save in flight. Flex Checkpoint's functions leave no other place for it."""


def clear_async_save_task_queue(process_group: Any = None) -> None:
    """Wait for the asynchronous save of a group, and raise its failure if it failed.

    Gives back the host memory and the group. Clear the queue before you drop a group.
    """
    saver = _SAVERS.pop(process_group, None)
    if saver is not None:
        saver.close()


def load_state_dict(
    state_dict: Mapping[str, Any],
    path: str | os.PathLike[str],
    process_group: Any = None,
    coordinator_rank: int = 0,
    unique_id: int | None = None,
    offload: bool = False,
    *,
    mw_name_compatibility: bool = True,
    aoa_config: Mapping[str, Any] | None = None,
) -> None:
    """Load a numbered checkpoint into a state dict, in place. Collective.

    The directory is one of `save_state_dict`, one of Paddle itself, or one checkpoint of
    `remesh.save`; by default the last checkpoint is taken. `offload` makes no difference: what is
    read always goes through host memory, in bounded pieces. With `mw_name_compatibility`, a master
    weight of a checkpoint that Paddle wrote is also found under the name that the other of Paddle's
    modes (dynamic, static graph) gives it. `aoa_config` may have `aoa_statements`, in the language
    that docs/transform.md specifies, and `aoa_config_reverse`. See `save_state_dict` for the rest.

    Raises:
        CheckpointNotFoundError: If there is no such checkpoint.
        MismatchError: If state dict and checkpoint do not fit. Nothing was changed.
    """
    del offload
    exchange = exchange_of(process_group)
    check_coordinator(exchange, coordinator_rank)
    transform = transform_of(aoa_config)
    place, of_paddle = _find(exchange, path, unique_id)
    names: dict[str, str] = {}
    if mw_name_compatibility and of_paddle:
        names = compatible_names(state_dict.keys() - of_paddle, of_paddle)
    load(_state_of(state_dict, names), place, transform=transform, group=exchange)


def _state_of(state_dict: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """A state dict as the engine takes it, some entries under other names."""
    if is_sharded_state_dict(state_dict):
        return engine_state(state_dict, names)
    if not names:
        return state_dict
    return {names.get(key, key): value for key, value in state_dict.items()}


def _place(path: str | os.PathLike[str], name: int | str) -> str:
    return f"{os.fspath(path).rstrip('/')}/{name}"


def _checked(number: int) -> int:
    if number < 0:
        raise StateError(f"unique_id={number} is no number of a checkpoint; they begin at 0")
    return number


def _next_number(exchange: Exchange, path: str | os.PathLike[str]) -> int:
    """The number after the last, as rank 0 sees it."""

    def look() -> bytes:
        return str(max(_numbers(open_storage(path)), default=-1) + 1).encode()

    return int(run_on_one(exchange, look))


def _numbers(storage: Storage) -> list[int]:
    """Numbers of the committed checkpoints in a directory."""
    return [int(name) for name in catalog.committed_names(storage) if name.isdecimal()]


def _find(
    exchange: Exchange, path: str | os.PathLike[str], unique_id: int | None
) -> tuple[str, set[str]]:
    """Where the checkpoint is that a number means, as rank 0 sees it."""

    def look() -> bytes:
        storage = open_storage(path)
        files = storage.list()
        if unique_id is None and catalog.holds_record(storage):
            return msgspec.msgpack.encode((os.fspath(path), ()))
        numbers, of_paddle = _numbers(storage), paddle.checkpoint_numbers(files)
        if unique_id in numbers or (unique_id is None and numbers):
            number = max(numbers) if unique_id is None else unique_id
            return msgspec.msgpack.encode((_place(path, number), ()))
        if unique_id in of_paddle or (unique_id is None and of_paddle):
            number = max(of_paddle) if unique_id is None else unique_id
            file = paddle.metadata_name(number)
            names = tuple(paddle.read_metadata(storage, file).state_dict_metadata)
            return msgspec.msgpack.encode((_place(path, file), names))
        wanted = "no checkpoint" if unique_id is None else f"no checkpoint {unique_id}"
        listed = ", ".join(map(str, sorted({*numbers, *of_paddle}))) or "none"
        raise CheckpointNotFoundError(f"{storage.url}: {wanted} is there; there are: {listed}")

    return msgspec.msgpack.decode(run_on_one(exchange, look), type=tuple[str, set[str]])
