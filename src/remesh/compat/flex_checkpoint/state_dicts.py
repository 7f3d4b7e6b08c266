"""Numbered checkpoints in one directory, and state dicts that fill others.

Flex Checkpoint keeps several checkpoints in a directory and tells them apart by a number, the
`unique_id`. Here each of them is a checkpoint of remesh in a directory of its own below that one,
`<path>/<unique_id>`, and exists completely or not at all. Without a number, saving takes the next
free one and loading the last committed one.

Directories that Paddle itself has written are loaded as they are.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch

from remesh.background import Saver
from remesh.checkpoint import load, save
from remesh.checkpoint.local import exchange_of
from remesh.checkpoint.resharding import reshard
from remesh.compat.flex_checkpoint.weights import ShardedWeight, is_sharded_state_dict
from remesh.core.sharded import ShardedTensor as EngineTensor
from remesh.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    StateError,
)
from remesh.exchange import Alone, Exchange, run_each, run_on_all, run_on_one
from remesh.formats import native, paddle
from remesh.formats.paddle import Metadata
from remesh.storage import open_storage
from remesh.transform import Transform

_LOGGER = logging.getLogger("remesh")

_MASTER = "master_weights"
_MASTER_SUFFIX = "_fp32_master_0"
_RECORD = re.compile(f"(0|[1-9][0-9]*)/{re.escape(native.RECORD_NAME)}")
_ENGINE_ARGUMENT = re.compile(r"\b(missing|transform)=")
_AOA_KEYS = frozenset({"aoa_statements", "aoa_config_reverse", "enable_traceback"})


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
    process group or an `Exchange`; by default torch's default group, or this process alone.
    `coordinator_rank` makes no difference: ranks that disagree are an error, so none decides alone.
    With `async_save` this returns as soon as the state may change again; what fails in the
    background is raised by the next save in this group, or by `clear_async_save_task_queue`.
    """
    del coordinator_rank
    exchange = exchange_of(process_group)
    saver = _SAVERS.get(process_group)
    if saver is not None:
        saver.wait()
    if unique_id is not None and unique_id < 0:
        raise StateError(f"unique_id={unique_id} is no number of a checkpoint; they begin at 0")
    number = _next_number(exchange, path) if unique_id is None else unique_id
    state = _engine_state(exchange, state_dict)
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
    del offload, coordinator_rank
    exchange = exchange_of(process_group)
    transform = _transform_of(aoa_config)
    place, of_paddle = _find(exchange, path, unique_id)
    names: dict[str, str] = {}
    if mw_name_compatibility and of_paddle:
        names = _compatible_names(state_dict.keys() - of_paddle, of_paddle)
    state = _engine_state(exchange, state_dict, names)
    with _with_own_advice():
        load(state, place, transform=transform, group=exchange)


def reshard_sharded_state_dict(
    src_sharded_state_dict: Mapping[str, ShardedWeight],
    dst_sharded_state_dict: Mapping[str, ShardedWeight],
    process_group: Any = None,
    coordinator_rank: int | None = 0,
    offload: bool | None = False,
    aoa_config: Mapping[str, Any] | None = None,
) -> None:
    """Fill sharded tensors from others that are cut in another way. Collective.

    Every rank of the group passes what it has of both; a rank that has nothing of one passes an
    empty dict. Only the bytes that are needed travel, and nothing is changed unless all fits. The
    target, which is filled in place, must not share memory with the source. `offload` makes no
    difference: what moves between ranks always goes through host memory, in bounded pieces. The
    other arguments are those of `load_state_dict`.

    Raises:
        CoverageError: If a part of a source tensor is in no shard.
        MismatchError: If the source lacks tensors of the target, or their shapes or dtypes differ.
    """
    del offload, coordinator_rank
    exchange = exchange_of(process_group)
    transform = _transform_of(aoa_config)
    source = _engine_state(exchange, src_sharded_state_dict)
    target = _engine_state(exchange, dst_sharded_state_dict)
    with _with_own_advice():
        reshard(source, target, transform=transform, group=exchange)


@contextmanager
def _with_own_advice() -> Iterator[None]:
    """Advise what these functions take, where the engine advises arguments of its own."""
    try:
        yield
    except MismatchError as error:
        lines = str(error).replace(" (cast=True converts)", "").splitlines()
        lines = [line for line in lines if not _ENGINE_ARGUMENT.search(line)]
        if error.missing:
            lines.append("Leave out what is not stored, or let statements in aoa_config make it.")
        raise MismatchError(
            "\n".join(lines), missing=error.missing, conflicts=error.conflicts
        ) from error


def _transform_of(aoa_config: Mapping[str, Any] | None) -> Transform | None:
    """The transformation that an AOA configuration asks for; None if it has no statements.

    `enable_traceback` may stand there and says nothing new: errors always show what each macro of
    a statement made of it.
    """
    config = aoa_config or {}
    unknown = sorted(config.keys() - _AOA_KEYS)
    if unknown:
        raise StateError(
            f"aoa_config has no {', '.join(unknown)}; it may have {', '.join(sorted(_AOA_KEYS))}"
        )
    statements = config.get("aoa_statements")
    if not statements:
        return None
    transform = Transform(statements)
    return transform.reversed() if config.get("aoa_config_reverse") else transform


def _engine_state(
    exchange: Exchange, state_dict: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> Any:
    """A state dict as the engine takes it, some entries under other names. Collective."""
    new = {key: (names or {}).get(key, key) for key in state_dict}

    def describe() -> Any:
        if is_sharded_state_dict(state_dict):
            return {new[key]: _described(key, one, new[key]) for key, one in state_dict.items()}
        return {new[key]: value for key, value in state_dict.items()} if names else state_dict

    return run_each(exchange, describe)


def _described(key: str, weight: ShardedWeight, name: str) -> EngineTensor | torch.Tensor:
    """A weight as the engine takes it; the bare tensor if it is all of it, as tied tensors are."""
    if weight.key != key:
        raise StateError(
            f"{key}: the weight under this key calls itself {weight.key!r}; give it one name"
        )
    tensor, described = weight.local_tensor, replace(weight.to_remesh(), name=name)
    is_whole = not weight.is_flattened and tuple(tensor.shape) == described.global_shape
    return tensor if is_whole else described


def _place(path: str | os.PathLike[str], name: int | str) -> str:
    return f"{os.fspath(path).rstrip('/')}/{name}"


def _next_number(exchange: Exchange, path: str | os.PathLike[str]) -> int:
    """The number after the last, as rank 0 sees it."""

    def look() -> bytes:
        return str(max(_numbers(open_storage(path).list()), default=-1) + 1).encode()

    return int(run_on_one(exchange, look))


def _numbers(files: Iterable[str]) -> list[int]:
    """Numbers of the committed checkpoints in a directory, by the files in it."""
    found = (_RECORD.fullmatch(path) for path in files)
    return [int(one[1]) for one in found if one is not None]


def _find(
    exchange: Exchange, path: str | os.PathLike[str], unique_id: int | None
) -> tuple[str, set[str]]:
    """Where the checkpoint is that a number means, as rank 0 sees it."""

    def look() -> bytes:
        storage = open_storage(path)
        files = storage.list()
        if unique_id is None and native.RECORD_NAME in files:
            return msgspec.msgpack.encode((os.fspath(path), ()))
        numbers, of_paddle = _numbers(files), paddle.checkpoint_numbers(files)
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


# ---------------------------------------------------------------------------------------------
# Checkpoints that Paddle has written
# ---------------------------------------------------------------------------------------------


def get_rank_to_files(
    metadata_list: Sequence[Metadata],
    local_data_files: Sequence[str],
    state_dict: Mapping[str, object],
    process_group: Any,
    use_dist: bool,
    mw_name_compatibility: bool = True,
) -> tuple[dict[int, list[str]], set[str], dict[str, str]]:
    """The data files that each rank needs. Collective if `use_dist`.

    Returns the files that each rank needs, in the order of the metadata and each once (empty if no
    rank needs any), the names that the checkpoint lacks, and the stored name of each master weight
    that is stored under its other name.
    """
    exchange = exchange_of(process_group) if use_dist else Alone()

    def tell() -> bytes:
        needed = _needed_files(metadata_list, state_dict)
        return msgspec.msgpack.encode((needed, list(local_data_files)))

    replies = [
        msgspec.msgpack.decode(reply, type=tuple[list[str], list[str]])
        for reply in run_on_all(exchange, tell)
    ]
    needed_anywhere = {file for needed, _ in replies for file in needed}
    if not needed_anywhere:
        _LOGGER.warning("no data file of the checkpoint holds a tensor that is to be loaded")
        return {}, set(state_dict), {}
    absent = sorted(needed_anywhere.difference(*(files for _, files in replies)))
    if absent:
        raise CorruptCheckpointError(
            f"the checkpoint is not complete: no rank can open {', '.join(absent)}"
        )
    stored = {index.tensor_key for metadata in metadata_list for index in metadata.storage_metadata}
    missing = set(state_dict) - stored
    renamed = _compatible_names(missing, stored) if mw_name_compatibility else {}
    missing.difference_update(renamed)
    if missing:
        _LOGGER.warning("the checkpoint lacks %s", ", ".join(sorted(missing)))
    return {rank: needed for rank, (needed, _) in enumerate(replies)}, missing, renamed


def _needed_files(metadata_list: Iterable[Metadata], state_dict: Mapping[str, object]) -> list[str]:
    """The files with boxes of the tensors that are to be loaded, each once."""
    seen = set()
    files: dict[str, None] = {}
    for metadata in metadata_list:
        for index, file in metadata.storage_metadata.items():
            if index in seen:
                raise CorruptCheckpointError(f"the metadata name {index} twice")
            seen.add(index)
            if index.tensor_key in state_dict:
                files[file] = None
    return list(files)


def _compatible_names(missing: Iterable[str], stored: Collection[str]) -> dict[str, str]:
    """The stored names of master weights that are stored under their other name.

    Paddle's dynamic mode calls the master weight of a parameter `<module>.master_weights.<name>`,
    its static mode `<module>.<name>_fp32_master_0`. The result is by the wanted names.
    """
    others = {name: _other_name(name) for name in missing}
    return {name: other for name, other in others.items() if other in stored}


def _other_name(name: str) -> str:
    parts = name.split(".")
    if _MASTER in parts:
        parts.remove(_MASTER)
        return ".".join(parts) + _MASTER_SUFFIX
    if name.endswith(_MASTER_SUFFIX):
        parts[-1] = parts[-1].removesuffix(_MASTER_SUFFIX)
        parts.insert(1, _MASTER)
        return ".".join(parts)
    return ""
