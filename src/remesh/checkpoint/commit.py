"""The end of a save: rank 0 makes a checkpoint exist once what all ranks wrote is durable.

This is one sequence (`commit`) for every format, and for saves in the foreground and in the
background alike. What differs is how rank 0 learns of the files of the others, and they of the end:
by the exchange (`remesh.exchange.join_outcomes`), or by small files in the storage
(`remesh.background.status_files`).

What is left to do once all data files are durable is short: the small files, of which the last is
the mark. Or the save is given up, and what was written is removed (`give_up`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import msgspec

from remesh import catalog
from remesh.checkpoint.agree import GlobalSavePlan
from remesh.checkpoint.sharing import check_arrived
from remesh.checkpoint.unchanged import remove_paths
from remesh.errors import CheckpointError, NoSpaceError, StorageError
from remesh.events import Emit
from remesh.formats.native import data_folder
from remesh.formats.table import writer_of
from remesh.formats.whole_tensors import decode_files
from remesh.formats.writer import Existing, Part, Rename, SmallFile
from remesh.maintenance.orphans import remove_files, remove_orphans
from remesh.storage import Storage, ask_together

Join = Callable[[Callable[[list[bytes]], list[bytes]], Callable[[], None]], object]
"""Joins on rank 0 what all ranks have written, or undoes: `join_outcomes` of a rank's outcome."""


def commit(join: Join, storage: Storage, save: GlobalSavePlan | None, emit: Emit) -> None:
    """Let rank 0 commit what all ranks have written. All ranks raise the failure of one.

    On rank 0 `save` is what it knows of the save. The reply of a rank is its encoded parts.
    """

    def finish_all(replies: list[bytes]) -> list[bytes]:
        assert save is not None
        finish(storage, save, decode_parts(replies), emit)
        return [b""] * len(replies)

    def undo() -> None:
        assert save is not None
        give_up(storage, save)

    join(finish_all, undo)


def encode_parts(parts: Sequence[Part]) -> bytes:
    """What a rank says of its files, to be sent to rank 0."""
    return msgspec.msgpack.encode(parts)


def decode_parts(replies: Sequence[bytes]) -> list[list[Part]]:
    """The parts that ranks have sent, in rank order."""
    return [msgspec.msgpack.decode(reply, type=list[Part]) for reply in replies]


def last_steps(
    save: GlobalSavePlan, parts: Sequence[Sequence[Part]]
) -> Sequence[SmallFile | Rename]:
    """The small files that finish the checkpoint, and renamed files; the last makes it exist.

    There are none if the checkpoint is a single data file that has its name. Parts are in rank
    order.
    """
    return writer_of(save.options.format).small_files(replace(save.saved, parts=parts))


def finish(
    storage: Storage, save: GlobalSavePlan, parts: Sequence[Sequence[Part]], emit: Emit
) -> None:
    """Rank 0: write the small files and, in one atomic step, the one that makes it exist.

    A failure before that step removes all files of the save, and so does a disk that is full for
    it. Another failure in it, or after it, leaves everything in place, because the checkpoint may
    be visible already. What `parts` says of files,
    in rank order, is durable.
    """
    writer, overwrite = writer_of(save.options.format), save.options.overwrite
    put: list[str] = []  # paths of small files that are there

    def put_one(path: str, data: bytes) -> None:
        storage.put(path, data, overwrite=not writer.has_record)
        put.append(path)

    try:
        written = [part for own in parts for part in own if not part.is_kept]
        unchanged = [part for own in parts for part in own if part.is_kept]
        emit("save.parts_gathered", sum(part.num_bytes for part in written))
        emit("save.stored", sum(part.stored_size for part in written))
        emit("save.kept", sum(part.num_bytes for part in unchanged))
        look = partial(_look, storage, save, parts)
        if not writer.has_record and any(parts[1:]):
            look()  # before small files replace those of another checkpoint
        others = list(last_steps(save, parts))
        mark = others.pop() if others else None
        small = [step for step in others if not isinstance(step, Rename)]
        renames = [step for step in others if isinstance(step, Rename)]
        # Nothing refers to the files in a folder yet.
        looks = [look] if writer.has_record else []
        ask_together(storage, [*looks, *(partial(put_one, *step) for step in small)])
        emit("save.index_written", sum(len(data) for _, data in small))
        storage.sync()
        emit("save.before_commit")
    except BaseException:
        give_up(storage, save, put=put)
        raise
    # Another job may have committed here since the ranks agreed; then its save is replaced, too.
    replaced = [save.replaced] if save.replaced is not None else []
    if overwrite:
        with suppress(CheckpointError, StorageError):  # what cannot be read is not removed
            now = writer.existing(storage, save.options.format_options)
            replaced += [now] if now is not None and now != save.replaced else []
    kept = {part.path for own in parts for part in own} | {*put}
    try:
        kept |= _commit(storage, renames, mark, overwrite)
    except NoSpaceError:
        with suppress(CheckpointError, StorageError):  # what cannot be read may be there
            now = writer.existing(storage, save.options.format_options)
            if writer.has_record and (now is None or now.save_id != save.saved.save_id):
                give_up(storage, save, put=put)
        raise
    emit("save.committed")
    if overwrite and writer.has_record:
        with suppress(StorageError):  # the checkpoint is there
            catalog.forget_replaced(storage)
    _remove_replaced(storage, replaced, kept)


def _look(storage: Storage, save: GlobalSavePlan, parts: Sequence[Sequence[Part]]) -> None:
    """Rank 0: see whether the files of all ranks are there."""
    has_record = writer_of(save.options.format).has_record
    files = ((rank, part.path, part.stored_size) for rank, own in enumerate(parts) for part in own)
    check_arrived(storage, f"{data_folder(save.saved.save_id)}/" if has_record else "", files)


def _commit(
    storage: Storage, renames: Sequence[Rename], mark: SmallFile | Rename | None, overwrite: bool
) -> set[str]:
    """Give data files their final names and make the checkpoint exist; the names it then has."""
    if mark is None:  # the checkpoint is its only data file
        return set()
    if not isinstance(mark, Rename):
        path, content = mark
        if renames:
            # Files that are there may have the same names: no mark says they belong together.
            storage.delete(path)
            _rename(storage, renames)
        storage.put(path, content, overwrite=overwrite)
        return {path, *(step.new for step in renames)}
    _rename(storage, [*renames, mark])
    return {step.new for step in [*renames, mark]}


def _rename(storage: Storage, renames: Sequence[Rename]) -> None:
    for step in renames:
        storage.rename(step.path, step.new)
    storage.sync()


def _remove_replaced(storage: Storage, replaced: Sequence[Existing], kept: set[str]) -> None:
    """Remove the files of checkpoints that have been replaced, as far as the storage can."""
    for one in replaced:
        remove_paths(storage, [path for path in one.paths if path not in kept])
        if one.save_id:
            remove_files(storage, one.save_id)
    if any(one.save_id for one in replaced):
        with suppress(StorageError):  # the checkpoint is there; leftovers may be removed later
            remove_orphans(storage)


def failure_path(save_id: str) -> str:
    """The file that says to the ranks of a background save why it has failed."""
    return f"{data_folder(save_id)}/failed.msgpack"


def give_up(storage: Storage, save: GlobalSavePlan, *, put: Sequence[str] = ()) -> None:
    """Rank 0, when a rank has failed: remove the data files of all ranks.

    A checkpoint that is a single file with its final name from the beginning stays: it is whole if
    it is there, and may be another writer's. The small files in `put` are removed as well.
    """
    writer, saved = writer_of(save.options.format), save.saved
    if not writer.has_record:
        of_rank = (
            writer.frames(saved.boxes, rows, rank, saved.save_id, saved.plan)
            for rank, rows in enumerate(saved.assignments)
        )
        paths = [frame.path for frames in of_rank for frame in frames]
        if not (writer.object_names and decode_files(saved.plan).names == "final"):
            remove_paths(storage, paths)
    remove_files(storage, saved.save_id, keep=failure_path(saved.save_id))
    # Where a checkpoint was to be replaced, small files with fixed names may be its own.
    remove_paths(storage, [path for path in put if save.replaced is None or saved.save_id in path])


def remove_own(storage: Storage, save_id: str, paths: Sequence[str]) -> None:
    """Remove the data files of this rank, where rank 0 does not see them."""
    remove_paths(storage, paths)
    remove_files(storage, save_id)
