"""Names that differ in their numbers alone, so that one of each kind is resolved for all.

A model has a hundred layers of hundreds of experts, and what a transformation makes of layer 7 is
what it makes of layer 3, with another number. So names are sorted into *groups*, which differ in
their numbers alone, and the numbers into *axes*: the component before a number (`layers.7`) says
which axis it is on, and names of one axis in a statement (`layers.$N -> blocks.$N`) make one axis
of two. Numbers of an axis are *alike* if exchanging them changes nothing: the same names exist,
with the same dtypes and shapes, among the sources and among the targets. Two of each kind are kept,
and the others are left out (`sampled`). What comes of the names that are left comes of all, with
the numbers put back (`Sample.own_name`).

That holds where names with different numbers have nothing to do with each other. An axis keeps all
its numbers if a `*` stands for them, a placeholder has an offset, or a statement has a name without
the placeholder. A number that a statement writes out is like no other. Names whose optimizer states
may begin with a number (`state.0.exp_avg`) are not sampled at all.

A transformation that only renames, by a rule or by a statement for each name, is seen in what
becomes of the names. Numbers are alike only if names that have them are renamed alike: a number of
the new name is one of the old name's, on the same axis then, or is written out.

Names are looked at by the column, with all digits blanked out, for there may be a million.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from remesh.geometry import BoolArray, IntArray
from remesh.pieces import distinct
from remesh.transform.optimizer_state import SLOTS
from remesh.transform.renames import Renaming
from remesh.transform.syntax import STAR, Name, Statement, Wildcard
from remesh.transform.tensor_info import Infos

MIN_NAMES = 2000
"""Fewer names are resolved as they are."""

NUM_KEPT = 2
"""Numbers kept of each kind: what names with different numbers have to do with each other shows."""

NAMES_A_GROUP = 8
"""Names of each group, and of each statement, on average: with fewer, few are alike."""

MAX_SHARE = 0.5
"""Samples with a larger share of the names are not worth it."""

_MAX_GROUPS = 10_000
_MAX_DIGITS = 17
_BLANKED = bytes.maketrans(b"123456789", b"000000000")
_CUTS = frozenset(["state", *(slot.translate(_BLANKED.decode("latin-1")) for slot in SLOTS)])
_WILDCARD = re.compile("\1([0-9]+)\1")
_WORD = re.compile("[^0-9\1]+")

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Names that differ in their numbers alone.

    Attributes:
        words: The component before each number.
        rows: Which names.
        numbers: (names, numbers) the numbers; see `_value`.
        keys: Equal for names of equal dtypes and shapes on one side, different between groups.
    """

    words: tuple[str, ...]
    rows: IntArray
    numbers: IntArray
    keys: Keys

    def take(self, rows: IntArray | BoolArray) -> _Group:
        return replace(self, rows=self.rows[rows], numbers=self.numbers[rows], keys=self.keys[rows])

    def names_apart(self, column: int) -> Keys:
        """A key of each name without one of its numbers."""
        keys = self.keys.copy()
        for other in range(len(self.words)):
            if other != column:
                keys += _mixed(self.numbers[:, other].astype(np.uint64) + _mixed_one(other))
        return _mixed(keys)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Names of each kind, which stand for all.

    Attributes:
        sources: The sources that are kept.
        targets: The targets that are kept.
        axes: The axis of each component before a number.
        first: The first number of the kind of each that is like others, by axis and number.
        members: The numbers of each of these kinds, by axis and first number.
        stand_in: For each name, sources before targets, the row of the name that stands for it.
    """

    sources: Infos
    targets: Infos
    axes: Mapping[str, str]
    first: Mapping[str, Mapping[str, str]]
    members: Mapping[str, Mapping[str, Sequence[str]]]
    stand_in: IntArray

    def numbers_of(self, name: str) -> list[tuple[int, str, str]]:
        """Components of a name that are numbers like others: their places, axes and the numbers."""
        axes, first = self.axes, self.first
        return [
            (place, axes[word], part)
            for place, (word, part) in enumerate(pairwise(name.split(".")), 1)
            if word in axes and part in first[axes[word]]
        ]

    def stand_in_of(self, name: str) -> tuple[str, dict[str, str]]:
        """The name that stands for a name, and the name's own numbers, by axis."""
        parts, own = name.split("."), {}
        for place, axis, number in self.numbers_of(name):
            own[axis] = number
            parts[place] = self.first[axis][number]
        return ".".join(parts), own

    def own_name(self, name: str, own: Mapping[str, str]) -> str:
        """The name of the sample for a name that has to do with another of these numbers."""
        parts = name.split(".")
        for place, axis, _ in self.numbers_of(name):
            parts[place] = own[axis]
        return ".".join(parts)

    def is_stand_in(self, name: str) -> bool:
        """Whether a name stands for all that are alike."""
        return self.stand_in_of(name)[0] == name

    def all_names(self, name: str) -> Iterator[str]:
        """The names that a name stands for."""
        found = self.numbers_of(name)
        choices = [self.members[axis][number] for _, axis, number in found]
        parts = name.split(".")
        for numbers in product(*choices):
            for (place, _, _), number in zip(found, numbers, strict=True):
                parts[place] = number
            yield ".".join(parts)

    def is_among(self, source: str, target: str) -> bool:
        """Whether a source has no number like others but those of a target."""
        known = {axis: number for _, axis, number in self.numbers_of(target)}
        return all(known.get(axis) == number for _, axis, number in self.numbers_of(source))


def sampled(
    statements: Sequence[Statement],
    sources: Infos,
    targets: Infos,
    owners: Mapping[str, str],
    aliases: Mapping[str, str],
    *,
    renaming: Renaming | None = None,
) -> Sample | None:
    """Some names of each kind; None if these would be most names.

    Arguments are those of `resolve`; where all that is done is renaming, no statements are needed.
    """
    num_names = len(sources) + len(targets)
    if num_names < MIN_NAMES or len(statements) * NAMES_A_GROUP > num_names:
        return None
    names = [*sources, *targets]
    codes = _codes(sources, targets)
    groups: list[_Group] = []
    for start, stop in ((0, len(sources)), (len(sources), num_names)):
        found = _groups(names[start:stop], codes[start:stop], start)
        if found is None or (len(groups) + len(found)) * NAMES_A_GROUP > num_names:
            return None
        groups += found
    words = [group.words for group in groups]
    literals = [*owners, *owners.values(), *aliases, *aliases.values()]
    moves = _Moves([], [], {})
    if renaming is not None:
        renamed = renaming.all_renamed(sources)
        found = None if renamed is None else _renamed(groups, *renamed, moves)
        if found is None or (len(groups) + len(moves.words)) * NAMES_A_GROUP > num_names:
            return None
        groups = found
    axes, pinned = _axes(statements, words, literals, moves)
    left, chosen = groups, dict[str, tuple[IntArray, IntArray]]()
    for axis in dict.fromkeys(axes.values()):
        numbers = {word: pinned.get(word, set()) for word in axes if axes[word] == axis}
        left, chosen[axis] = _thinned(left, axis, axes, set().union(*numbers.values()))
    rows = np.sort(np.concatenate([group.rows for group in left]))
    if len(rows) > MAX_SHARE * num_names:
        return None
    kept = [names[row] for row in rows.tolist()]
    num_kept = int(np.searchsorted(rows, len(sources)))
    texts = {axis: [_text(one) for one in _shared(*pair)] for axis, pair in chosen.items()}
    members: dict[str, dict[str, list[str]]] = {axis: {} for axis in texts}
    for axis, (numbers_of_axis, firsts) in texts.items():
        for number, first in zip(numbers_of_axis, firsts, strict=True):
            members[axis].setdefault(first, []).append(number)
    return Sample(
        {name: sources[name] for name in kept[:num_kept]},
        {name: targets[name] for name in kept[num_kept:]},
        axes,
        {axis: dict(zip(*pair, strict=True)) for axis, pair in texts.items()},
        members,
        _stand_ins(groups, left, axes, chosen, num_names),
    )


# ---------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------


def _codes(sources: Infos, targets: Infos) -> IntArray:
    """For each name a number for its side and what is known of it."""
    infos = [*sources.values(), *targets.values()]
    _, first, of = np.unique(
        np.fromiter(map(id, infos), np.int64, len(infos)), return_index=True, return_inverse=True
    )
    known: dict[object, int] = {}
    small = [
        known.setdefault(info and (info.dtype, info.shape, info.num_pieces), len(known))
        for info in map(infos.__getitem__, first.tolist())
    ]
    codes: IntArray = 2 * np.array(small, dtype=np.int64)[of]
    codes[len(sources) :] += 1
    return codes


def _groups(names: Sequence[str], codes: IntArray, before: int) -> list[_Group] | None:
    """Names by group; None if there are too many groups, or numbers that cannot be sampled.

    Args:
        names: Names of one side.
        codes: See `_codes`.
        before: The row of the first.
    """
    if not names:
        return []
    text = "\n".join(names).encode(errors="surrogatepass")
    lines = text.translate(_BLANKED).split(b"\n")
    if len(lines) != len(names) or b"\0" in text or b"\1" in text:
        return None
    known = {line: number for number, line in enumerate(dict.fromkeys(lines))}
    form = np.fromiter(map(known.__getitem__, lines), np.int64, len(lines))
    if len(known) > _MAX_GROUPS:
        return None
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    starts = np.cumsum(lengths + 1) - lengths - 1
    data = np.frombuffer(text, np.uint8)
    order = np.argsort(form.astype(np.uint16), kind="stable")
    bounds = np.searchsorted(form[order], np.arange(len(known) + 1)).tolist()
    parts: dict[bytes, list[tuple[tuple[str, ...], IntArray, IntArray]]] = {}
    for number, line in enumerate(known):
        places = _places(line)
        if places is None:
            return None
        rows = order[bounds[number] : bounds[number + 1]]
        begin = starts[rows][:, None]
        numbers = np.zeros((len(rows), len(places)), dtype=np.int64)
        for column, (start, stop, _) in enumerate(places):
            digits = data[begin + np.arange(start, stop)] - ord("0")
            numbers[:, column] = _value(digits)
        words = tuple(word for *_, word in places)
        for literal, same in _by_literal_digits(line, places, data, begin):
            parts.setdefault(literal, []).append((words, rows[same], numbers[same]))
        if len(parts) > _MAX_GROUPS:
            return None
    groups = []
    for number, chunks in enumerate(parts.values()):
        rows = np.concatenate([rows for _, rows, _ in chunks])
        numbers = np.concatenate([numbers for *_, numbers in chunks])
        keys = _mixed(codes[rows].astype(np.uint64) + _mixed_one(before + number))
        groups.append(_Group(chunks[0][0], before + rows, numbers, keys))
    return groups


def may_be_numbered(name: str) -> bool:
    """Whether the numbers of a name are all where `sampled` looks for them."""
    return _places(name.encode(errors="surrogatepass").translate(_BLANKED)) is not None


def _places(line: bytes) -> list[tuple[int, int, str]] | None:
    """Where a name with blanked digits has numbers of an axis, and the component before each.

    None if a name of this form must not be sampled.
    """
    places = []
    parts = line.decode(errors="surrogatepass").split(".")
    start = 0
    for place, part in enumerate(parts):
        stop = start + len(part.encode(errors="surrogatepass"))
        if place and part and not part.strip("0"):
            word = parts[place - 1]
            # Where a short name of a parameter may begin, or a slot is a number.
            if word in _CUTS or ("state" in parts and place == len(parts) - 1):
                return None
            if word and "0" not in word:
                if len(part) > _MAX_DIGITS:
                    return None
                places.append((start, stop, word))
        start = stop + 1
    return places


def _by_literal_digits(
    line: bytes,
    places: Sequence[tuple[int, int, str]],
    data: npt.NDArray[np.uint8],
    begin: IntArray,
) -> Iterator[tuple[bytes, IntArray]]:
    """Names of a form by the digits that are no numbers of an axis: what they share, and rows."""
    in_numbers = {at for start, stop, _ in places for at in range(start, stop)}
    literal = [at for at, byte in enumerate(line) if byte == ord("0") and at not in in_numbers]
    shared = bytearray(line)

    def cut() -> bytes:
        text = bytes(shared)
        for start, stop, _ in reversed(places):
            text = text[:start] + b"\0" + text[stop:]
        return text

    if not literal:
        yield cut(), np.arange(len(begin))
        return
    digits = data[begin + np.array(literal)]
    first, of = distinct(*digits.T.astype(np.int64))
    order = np.argsort(of, kind="stable")
    bounds = np.searchsorted(of[order], np.arange(len(first) + 1)).tolist()
    for kind, row in enumerate(first.tolist()):
        for at, digit in zip(literal, digits[row].tolist(), strict=True):
            shared[at] = digit
        yield cut(), order[bounds[kind] : bounds[kind + 1]]


def _value(digits: npt.NDArray[np.uint8]) -> IntArray:
    """Runs of digits as numbers: a 1 before them keeps leading zeros."""
    value = np.ones(len(digits), dtype=np.int64)
    for column in digits.T:
        value = value * 10 + column
    return value


def _text(values: IntArray) -> list[str]:
    """The digits of numbers."""
    return [str(value)[1:] for value in values.tolist()]


def _shared(numbers: IntArray, first: IntArray) -> tuple[IntArray, IntArray]:
    """Numbers that are like others, and the first of their kind."""
    _, of, counts = np.unique(first, return_inverse=True, return_counts=True)
    is_shared = counts[of] > 1
    return numbers[is_shared], first[is_shared]


# ---------------------------------------------------------------------------------------------
# Renames
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """How the numbers of names go on in new names.

    Attributes:
        words: The component before each number, of each form of new names.
        same: Words before a number of a new name, and before the same number of the old one.
        pinned: Numbers of new names that are none of the old name's, by the word before them.
    """

    words: list[tuple[str, ...]]
    same: list[tuple[str, str]]
    pinned: dict[str, set[int]]


def _renamed(
    groups: Sequence[_Group],
    renamed: Sequence[str | None],
    has_rename: Sequence[bool],
    moves: _Moves,
) -> list[_Group] | None:
    """Groups whose keys are equal only for names that are renamed alike.

    Args:
        groups: The groups, those of sources first.
        renamed: What becomes of each source.
        has_rename: Whether a source is renamed at all, if to the same name.
        moves: Gets how the numbers of the names go on.

    Returns:
        None if the new names have too many forms, or numbers that cannot be sampled.
    """
    num_sources = len(renamed)
    is_gone = np.array([new is None for new in renamed], dtype=np.bool_)
    changed = np.flatnonzero(np.array(has_rename, dtype=np.bool_) & ~is_gone)
    texts = [renamed[row] or "" for row in changed.tolist()]
    found = _groups(texts, np.zeros(len(texts), dtype=np.int64), 0)
    if found is None:
        return None
    kinds = is_gone.astype(np.uint64)
    of, place = (np.zeros(num_sources, dtype=np.int64) for _ in range(2))
    for number, group in enumerate(groups):
        if len(group.rows) and group.rows[0] < num_sources:
            of[group.rows], place[group.rows] = number, np.arange(len(group.rows))
    for number, new in enumerate(found):
        moves.words.append(new.words)
        all_rows = changed[new.rows]
        kinds[all_rows] = _mixed_one(number)
        for before in np.unique(of[all_rows]).tolist():
            here = of[all_rows] == before
            rows, numbers, old = all_rows[here], new.numbers[here], groups[before]
            old_numbers = old.numbers[place[rows]]
            for column, word in enumerate(new.words):
                values = numbers[:, column]
                equal = np.flatnonzero((old_numbers == values[:, None]).all(axis=0)).tolist()
                if equal:
                    known = [old.words[n] for n in equal]
                    moves.same.append((word, word if word in known else known[0]))
                else:
                    moves.pinned.setdefault(word, set()).update(values.tolist())
                    kinds[rows] = _mixed(kinds[rows] + values.astype(np.uint64))
    return [
        replace(group, keys=_mixed(group.keys + kinds[group.rows]))
        if len(group.rows) and group.rows[0] < num_sources
        else group
        for group in groups
    ]


# ---------------------------------------------------------------------------------------------
# Axes
# ---------------------------------------------------------------------------------------------


def _axes(
    statements: Sequence[Statement],
    words_of_groups: Sequence[tuple[str, ...]],
    literals: Iterable[str],
    moves: _Moves,
) -> tuple[dict[str, str], dict[str, set[int]]]:
    """The axis of each word whose numbers may be left out, and numbers that are like no others."""
    words_of_groups = [*words_of_groups, *moves.words]
    words = {word: word for group in words_of_groups for word in group}
    frozen: set[str] = set()
    pinned = moves.pinned
    for text in literals:
        _pin(text, pinned)

    def root(word: str) -> str:
        words.setdefault(word, word)
        while words[word] != word:
            word = words[word]
        return word

    for word, other in moves.same:
        words[root(word)] = root(other)
    for statement in statements:
        names = [name for name in (*statement.left, *statement.right) if not name.is_nothing]
        found = [_wildcards_of(name, pinned) for name in names]
        for wildcard in dict.fromkeys(one for places in found for one, _ in places):
            own = [[word for one, word in places if one == wildcard] for places in found]
            known = [word for group in own for word in group if word is not None]
            is_free = wildcard != STAR and all(group and None not in group for group in own)
            for word in known:
                words[root(word)] = root(known[0])
            if not is_free:
                frozen.update(known)
    for group in words_of_groups:
        roots = [root(word) for word in group]
        frozen.update(one for one in roots if roots.count(one) > 1)
    unsampled = {root(word) for word in frozen}
    axes = {word: root(word) for word in list(words)}
    return {word: axis for word, axis in axes.items() if axis not in unsampled}, pinned


def _wildcards_of(name: Name, pinned: dict[str, set[int]]) -> list[tuple[str, str | None]]:
    """The wildcards of a name, and the component before each; None if it is no whole component.

    Numbers that are written out are added to `pinned`.
    """
    wildcards = [piece for piece in name.pieces if isinstance(piece, Wildcard)]
    marks = iter(range(len(wildcards)))
    text = "".join(
        f"\1{next(marks)}\1" if isinstance(piece, Wildcard) else piece for piece in name.pieces
    )
    _pin(text, pinned)
    parts = f"{text}_".split(".") if name.array is not None else text.split(".")
    found: list[tuple[str, str | None]] = []
    for place, part in enumerate(parts):
        for match in _WILDCARD.finditer(part):
            wildcard = wildcards[int(match[1])]
            word = parts[place - 1] if place and match[0] == part and not wildcard.offset else ""
            found.append((wildcard.name, word if _WORD.fullmatch(word) else None))
    return found


def _pin(text: str, pinned: dict[str, set[int]]) -> None:
    """Note the numbers of a name as like no others."""
    parts = text.split(".")
    for word, part in pairwise(parts):
        if part.isdecimal() and part.isascii() and len(part) <= _MAX_DIGITS:
            pinned.setdefault(word, set()).add(int(f"1{part}"))


def _thinned(
    groups: Sequence[_Group], axis: str, axes: Mapping[str, str], pinned: set[int]
) -> tuple[list[_Group], tuple[IntArray, IntArray]]:
    """Groups with few numbers of each kind on an axis; its numbers, and the first of each kind.

    Numbers are alike if the keys of the names that have them are the same.
    """
    columns = [
        next((n for n, word in enumerate(group.words) if axes.get(word) == axis), None)
        for group in groups
    ]
    here = [(group, n) for group, n in zip(groups, columns, strict=True) if n is not None]
    if not here:
        none = np.zeros(0, dtype=np.int64)
        return list(groups), (none, none)
    numbers, of = np.unique(
        np.concatenate([group.numbers[:, n] for group, n in here]), return_inverse=True
    )
    sums = np.zeros(len(numbers), dtype=np.uint64)
    np.add.at(sums, of, np.concatenate([group.names_apart(n) for group, n in here]))
    own = np.where(np.isin(numbers, sorted(pinned)), numbers, 0)
    first, kind = distinct(sums.view(np.int64), own)
    order = np.argsort(kind, kind="stable")
    place = np.empty_like(kind)
    place[order] = np.arange(len(kind)) - np.searchsorted(kind[order], kind[order])
    is_kept = place < NUM_KEPT
    thinned = [
        group if n is None else group.take(is_kept[np.searchsorted(numbers, group.numbers[:, n])])
        for group, n in zip(groups, columns, strict=True)
    ]
    return thinned, (numbers, numbers[first][kind])


def _stand_ins(
    groups: Sequence[_Group],
    left: Sequence[_Group],
    axes: Mapping[str, str],
    chosen: Mapping[str, tuple[IntArray, IntArray]],
    num_names: int,
) -> IntArray:
    """For each name, the row of the name that stands for it."""
    stand_in = np.zeros(num_names, dtype=np.int64)
    for group, few in zip(groups, left, strict=True):
        keys, kept = np.zeros_like(group.keys), np.zeros_like(few.keys)
        for n, word in enumerate(group.words):
            numbers = group.numbers[:, n]
            if word in axes:
                known, first = chosen[axes[word]]
                numbers = first[np.searchsorted(known, numbers)]
            keys = _mixed(keys + numbers.astype(np.uint64))
            kept = _mixed(kept + few.numbers[:, n].astype(np.uint64))
        order = np.argsort(kept)
        stand_in[group.rows] = few.rows[order[np.searchsorted(kept[order], keys)]]
    return stand_in


def _mixed(keys: Keys) -> Keys:
    """Other keys, in which every bit depends on every bit."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def _mixed_one(number: int) -> np.uint64:
    """A key of a small number, different from those of all others."""
    return np.uint64(
        _mixed(np.array([number + 1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))[0]
    )
