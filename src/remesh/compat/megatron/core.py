"""The config of a checkpoint, `metadata.json`, the base exception, and values without pickle.

`metadata.json` names the backends that wrote the sharded and the common part, so that a load finds
its strategies by itself. It is written last; a directory without it is no distributed checkpoint.

What Megatron pickles (arguments, RNG states, extra state of layers) are plain values with tensors,
numpy arrays and byte streams in between, which `remesh.core.values` encodes. A value of any other
type is refused when it is saved, and one whose class is unknown here when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from remesh.checkpoint.local import exchange_of
from remesh.core import values
from remesh.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    MismatchError,
    RankFailedError,
    StateError,
)
from remesh.exchange import run_each
from remesh.formats.table import place_of
from remesh.storage import Storage

T = TypeVar("T")

CONFIG_FNAME = "metadata.json"


class CheckpointingException(Exception):  # noqa: N818 - the name is Megatron's
    """Base of what the drop-in raises; the engine's error, if there is one, is its cause."""


@contextmanager
def as_checkpointing_exception() -> Iterator[None]:
    """Turn the engine's errors about states and checkpoints into `CheckpointingException`.

    Errors of the storage and of the process group stay what they are.
    """
    try:
        yield
    except (StateError, MismatchError, CheckpointError, RankFailedError) as error:
        raise CheckpointingException(str(error)) from error


def on_all_ranks(work: Callable[[], T]) -> T:
    """This rank's result of some work, once all ranks have done it; a failure raises on all."""
    with as_checkpointing_exception():
        return run_each(exchange_of(None), work)


@dataclass
class CheckpointingConfig:
    """The formats that a checkpoint is written in; not what the application put into it."""

    sharded_backend: str  # format of sharded tensors and objects
    sharded_backend_version: int = 1
    common_backend: str = "torch"  # format of the common state
    common_backend_version: int = 1


def check_is_distributed_checkpoint(checkpoint_dir: Any) -> bool:
    """True if `metadata.json` is there and is a valid config."""
    return maybe_load_config(checkpoint_dir) is not None


def storage_of(checkpoint_dir: Any) -> Storage:
    """Where a checkpoint lies: a path, a URL or a storage."""
    return place_of(checkpoint_dir).storage


def maybe_load_config(checkpoint_dir: Any) -> CheckpointingConfig | None:
    """The config of a checkpoint, or None if there is no distributed checkpoint."""
    if not checkpoint_dir:
        return None
    storage = storage_of(checkpoint_dir)
    try:
        text = storage.read(CONFIG_FNAME)
    except CheckpointNotFoundError:
        return None
    try:
        # Fields that are not known are ignored: newer Megatron writes some.
        return msgspec.json.decode(text, type=CheckpointingConfig)
    except msgspec.MsgspecError as error:
        raise CheckpointingException(
            f"{storage.url}/{CONFIG_FNAME}: not the config of a checkpoint ({error})\nRestore it "
            "from a copy, or load another checkpoint"
        ) from error


def save_config(config: CheckpointingConfig, checkpoint_dir: Any) -> None:
    """Write `metadata.json`, atomically and durably."""
    storage_of(checkpoint_dir).put(CONFIG_FNAME, msgspec.json.encode(config), overwrite=True)


def require_known(value: Any, where: str) -> Any:
    """The decoded value; an error that names `where` if a type in it is not known here."""
    unknown = next(values.unresolved(value), None)
    if unknown is None:
        return value
    if unknown.kind == "pickle":
        raise CheckpointingException(f"{where}: {unknown.payload}")
    raise CheckpointingException(
        f"{where}: this program does not know {unknown.type_name}\nImport the module that defines "
        "it before loading"
    )
