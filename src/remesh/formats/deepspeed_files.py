"""The files of DeepSpeed's ranks, and how they cut flattened groups of parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remesh._repr import shown
from remesh.core.values import UnresolvedValue
from remesh.errors import FormatVersionError
from remesh.formats.archive import Archive
from remesh.formats.checks import check_name, damaged, integers
from remesh.formats.flat_parts import FlatPart
from remesh.formats.pickle_values import ArchivedTensor

NOT_READ = (
    "parameters that are cut over other ranks than the rest, in a way that is not read; make a "
    "universal checkpoint of it with DeepSpeed's ds_to_universal.py and read that"
)
_EXPERT = re.compile(r"\.deepspeed_experts\.(?P<number>[0-9]{1,6})(?=\.|$)")


@dataclass(frozen=True, slots=True)
class RankFile:
    """A file with a dict in it."""

    path: str
    archive: Archive
    content: Mapping[Any, Any]

    @property
    def where(self) -> str:
        """The file, for error messages."""
        return self.archive.where

    def part(self, value: object, what: str) -> FlatPart:
        """The elements of a tensor in one dim."""
        if not isinstance(value, ArchivedTensor) or len(value.shape) != 1:
            raise damaged(self.where, f"{what} is no tensor in one dim")
        if value.strides != (1,) and value.shape[0] > 1:
            raise damaged(self.where, f"{what} does not lie without gaps")
        return FlatPart(self.path, self.archive.position(value), value.shape[0], value.dtype)


def mapping(value: object, where: str, what: str) -> Mapping[Any, Any]:
    """A value that has to be a dict."""
    if not isinstance(value, Mapping):
        raise damaged(where, f"{what} is {shown(value)}, which is no dict")
    return value


def sequence(value: object, where: str, what: str) -> Sequence[Any]:
    """A value that has to be a list."""
    if not isinstance(value, list | tuple):
        raise damaged(where, f"{what} is {shown(value)}, which is no list")
    return value


def shape_of(value: object, where: str) -> tuple[int, ...]:
    """A value that has to be a shape."""
    # Pickled shapes are of a class of torch, which may not be there.
    numbers = value.payload if isinstance(value, UnresolvedValue) else value
    return integers(numbers, where, "the shape of a parameter")


def param_shapes(file: RankFile) -> list[dict[str, tuple[int, ...]]]:
    """The parameters of each group, in the order in which they lie flattened."""
    found = file.content.get("param_shapes")
    if found is None:
        return []
    # Early versions have one dict of all groups.
    groups = [found] if isinstance(found, Mapping) else sequence(found, file.where, "param_shapes")
    return [
        {
            check_name(name, file.where): shape_of(shape, f"{file.where}: {name!s:.200}")
            for name, shape in mapping(group, file.where, "param_shapes").items()
        }
        for group in groups
    ]


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of the optimizer."""

    file: RankFile
    weights: Sequence[Any]  # the flattened float32 parameters of each group
    state: Sequence[Mapping[Any, Any]]  # the state of each group, by key
    groups: Sequence[Any]  # the options of each group of the optimizer; none if they are not stored
    paddings: Sequence[Any]  # elements behind each parameter of each group; empty if there are none
    cuts_parameters: bool  # whether each parameter was cut, as ZeRO 3 does it, and not each group
    counts: tuple[int, ...] = ()
    """Over how many ranks each group is cut, or one number for all; empty if not stored."""

    @classmethod
    def of(cls, file: RankFile) -> Shard:
        """The shard that a file describes."""
        where = file.where
        content = mapping(file.content.get("optimizer_state_dict"), where, "optimizer_state_dict")
        if content.get("ds_zero_partition_groups"):
            raise FormatVersionError(f"{where}: {NOT_READ}")
        cuts_parameters = "fp32_flat_groups" in content
        key = "fp32_flat_groups" if cuts_parameters else "single_partition_of_fp32_groups"
        weights = sequence(content.get(key), where, key)
        paddings = sequence(content.get("param_alignment_paddings") or [], where, "paddings")
        stored_counts = content.get("partition_count")
        found = stored_counts if isinstance(stored_counts, list) else [stored_counts]
        counts = tuple(one for one in found if type(one) is int and one > 0)
        base = content.get("optimizer_state_dict" if cuts_parameters else "base_optimizer_state")
        if isinstance(base, list | tuple):  # elastic checkpoints: the state of each group alone
            if len(base) != len(weights):
                raise damaged(where, f"has the state of {len(base)} of {len(weights)} groups")
            state = [mapping(one, where, "the state of a group") for one in base]
            return cls(file, weights, state, [], paddings, cuts_parameters, counts)
        base = mapping(base, where, "the state of the optimizer")
        stored = mapping(base.get("state"), where, "the state of the optimizer")
        state = [
            mapping(stored.get(number, {}), where, "the state of a group")
            for number in range(len(weights))
        ]
        groups = sequence(base.get("param_groups"), where, "param_groups")
        return cls(file, weights, state, groups, paddings, cuts_parameters, counts)


def holders_of(
    group: Mapping[str, tuple[int, ...]], number: int, shards: Sequence[Shard]
) -> list[tuple[dict[str, str], Sequence[Shard]]]:
    """The ranks that hold parts of a group: all of them, or for experts those of each share.

    Expert-parallel ranks follow each other, and all call their experts 0, 1 and so on. For each
    share: the name in the model of each parameter of the group, and the ranks.
    """
    counts = shards[0].counts
    count = counts[number] if number < len(counts) else len(shards)
    num_shares = len(shards) // count
    if num_shares <= 1:
        return [({name: name for name in group}, shards)]
    found = {name: _EXPERT.search(name) for name in group}
    numbers = {int(match["number"]) for match in found.values() if match is not None}
    if None in found.values() or len(shards) % count or numbers != {*range(len(numbers))}:
        raise FormatVersionError(f"{shards[0].file.where}: {NOT_READ}")
    shares = []
    for share in range(num_shares):
        names = {
            name: f"{name[: match.start('number')]}{share * len(numbers) + int(match['number'])}"
            f"{name[match.end('number') :]}"
            for name, match in found.items()
            if match is not None
        }
        shares.append((names, shards[share::num_shares]))
    return shares


Cut = Callable[[Mapping[str, tuple[int, ...]], Sequence[FlatPart], str], dict[str, list[FlatPart]]]
"""Shapes of a group's parameters, what each rank holds of the group and a file → their parts."""


def cut_group(
    group: Mapping[str, tuple[int, ...]],
    parts: Sequence[FlatPart],
    where: str,
    *,
    paddings: Sequence[int],
) -> dict[str, list[FlatPart]]:
    """The parts of each parameter of a group that is cut as a whole."""
    found, start = {}, 0
    num_elements = sum(part.num_elements for part in parts)
    for (name, shape), padding in zip(group.items(), paddings, strict=True):
        stop = start + math.prod(shape)
        if stop > num_elements:
            raise damaged(where, f"a group has fewer elements than its parameter {name}")
        own, begin = [], 0
        for part in parts:
            low, high = max(start - begin, 0), min(stop - begin, part.num_elements)
            if low < high:
                own.append(part.range(low, high))
            begin += part.num_elements
        found[name] = own or [parts[0].range(0, 0)]
        start = stop + padding
    return found


def cut_parameters(
    group: Mapping[str, tuple[int, ...]], parts: Sequence[FlatPart], where: str
) -> dict[str, list[FlatPart]]:
    """The parts of each parameter of a group whose parameters are cut one by one."""
    found: dict[str, list[FlatPart]] = {}
    offset = 0
    for name, shape in group.items():
        size = math.prod(shape)
        length = -(-size // len(parts))
        own = []
        for rank, part in enumerate(parts):
            held = max(min(length, size - rank * length), 0)
            if offset + held > part.num_elements:
                raise damaged(where, f"a group has fewer elements than its parameter {name}")
            own.append(part.range(offset, offset + held))
        found[name] = own
        offset += length
    return found
