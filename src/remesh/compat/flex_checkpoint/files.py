"""Which files of a Paddle checkpoint which rank needs, and the two names of a master weight."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from remesh.checkpoint.local import exchange_of
from remesh.errors import CorruptCheckpointError
from remesh.exchange import Alone, run_on_all
from remesh.formats.paddle import Metadata

_LOGGER = logging.getLogger("remesh")

_MASTER = "master_weights"
_MASTER_SUFFIX = "_fp32_master_0"


def get_rank_to_files(
    metadata_list: Sequence[Metadata],
    local_data_files: Sequence[str],
    state_dict: Mapping[str, object],
    process_group: Any,
    use_dist: bool,
    mw_name_compatibility: bool = True,
) -> tuple[dict[int, list[str]], set[str], dict[str, str]]:
    """Which data files each rank needs. Collective if `use_dist`.

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
    renamed = compatible_names(missing, stored) if mw_name_compatibility else {}
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


def compatible_names(missing: Iterable[str], stored: Collection[str]) -> dict[str, str]:
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
