"""Each value in the files of each format, replaced in turn by one of each type.

Drawn damage finds a field that is used before its type is known only by luck; this walks over all
of them: in JSON, in msgpack, in headers of safetensors files and the JSON in their metadata, and on
the stack of each pickle. Files of remesh get the digests that they then have.

The walk is long: `make test-slow` takes all JSON and a share of the rest, `make test-nightly` all.
"""

from __future__ import annotations

import copy
import datetime as dt
import io
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import pytest

from remesh.core.integrity import hex_digest
from remesh.formats import native
from tests.campaigns.settings import dice_of, noted, seed, share
from tests.fuzz.checkpoints import make_checkpoint
from tests.fuzz.files import Files
from tests.fuzz.mutations import record_file
from tests.fuzz.pickles import opcodes
from tests.fuzz.trees import slots_of, to_json
from tests.fuzz.trial import attempt, import_late_modules, sound_state

IN_JSON: tuple[Any, ...] = (None, True, 0.5, "x", [], {"x": 1}, -1, 1 << 70)
IN_MSGPACK: tuple[Any, ...] = (
    *(None, True, 0.5, "x", [], {"x": 1}, -1, b"x", {1: 2}),
    *(dt.datetime(2024, 1, 1, tzinfo=dt.UTC), msgspec.msgpack.Ext(5, b"x")),
    *({"$": "dict", "v": [[[], 1]]}, {"$": "torch.Size", "v": ["x"]}, {"$": "x", "v": 1}),
)
IN_PICKLES: dict[str, bytes] = {
    "None": b"N",
    "True": b"\x88",
    "-1": b"J\xff\xff\xff\xff",
    "2^64": b"\x8a\x09" + bytes(8) + b"\1",
    "0.5": b"G" + struct.pack(">d", 0.5),
    "text": b"X\1\0\0\0x",
    "bytes": b"C\1x",
    "list": b"]X\1\0\0\0xa",
    "tuple": b")",
    "dict": b"}X\1\0\0\0xK\1s",
    "set": b"\x8f",
    "dtype": b"ctorch\nfloat32\n",
    "unknown class": b"csome.where\nUnknown\n",
    "unknown object": b"csome.where\nUnknown\n)\x81",
}
"""Opcodes that push a value."""


@dataclass(frozen=True)
class Part:
    """A part of a checkpoint, and what gives the files with other content in its place."""

    where: str
    content: Any
    put: Callable[[Any], Files]


Change = tuple[str, Callable[[], Files]]
"""A description of a change, and what makes it."""


# ---------------------------------------------------------------------------------------------
# Parts of each kind
# ---------------------------------------------------------------------------------------------


def json_parts(files: Files) -> Iterator[Part]:
    for path, content in sorted(files.items()):
        if path == native.RECORD_NAME:
            yield Part(path, json.loads(content)["record"], partial(_put, files, path, _record))
        elif content[:1] in {b"{", b"["}:
            yield Part(path, json.loads(content), partial(_put, files, path, to_json))


def _record(tree: Any) -> bytes:
    return record_file(to_json(tree))


def msgpack_parts(files: Files) -> Iterator[Part]:
    for path, content in sorted(files.items()):
        if path.endswith(".msgpack"):
            tree = msgspec.msgpack.decode(content)
            yield Part(path, tree, partial(_put, files, path, msgspec.msgpack.encode))


def header_parts(files: Files) -> Iterator[Part]:
    for path, content in sorted(files.items()):
        if content[8:9] != b"{":
            continue
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        put = partial(_put, files, path, partial(_with_header, content, length))
        yield Part(path, header, put)
        for key, text in header.get("__metadata__", {}).items():
            if text[:1] in {"{", "["}:
                inner = partial(_put_metadata, put, header, key)
                yield Part(f"{path}, {key}", json.loads(text), inner)


def _with_header(content: bytes, length: int, header: Any) -> bytes:
    """A safetensors file with another header, padded so that the data stays where it was."""
    text = to_json(header).ljust(length)
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


def _put_metadata(put: Callable[[Any], Files], header: Any, key: str, tree: Any) -> Files:
    metadata = header["__metadata__"] | {key: to_json(tree).decode()}
    return put(header | {"__metadata__": metadata})


def pickle_parts(files: Files) -> Iterator[Part]:
    for path, content in sorted(files.items()):
        if path.endswith(".distcp"):
            continue  # many archives, whose pickles are as those of other files
        if content[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                entries = {name: archive.read(name) for name in archive.namelist()}
            name = next(name for name in entries if name.endswith("data.pkl"))
            put = partial(_put, files, path, partial(_archive, entries, name))
            yield Part(path, entries[name], put)
        elif content[:1] == b"\x80" and content[-1:] == b".":
            yield Part(path, content, partial(_put, files, path, bytes))


def _archive(entries: dict[str, bytes], name: str, pickle: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for entry, data in (entries | {name: pickle}).items():
            archive.writestr(entry, data)
    return made.getvalue()


def _put(files: Files, path: str, encode: Callable[[Any], bytes], content: Any) -> Files:
    """The files with another one; small files of remesh get the digests that they then have."""
    changed = files | {path: encode(content)}
    if native.RECORD_NAME not in files or path == native.RECORD_NAME:
        return changed
    record = json.loads(files[native.RECORD_NAME])["record"]
    for entry in (record["index"], record["values"]):
        data = changed[entry["path"]]
        entry |= {"num_bytes": len(data), "digest": hex_digest(data)}
    return changed | {native.RECORD_NAME: record_file(to_json(record))}


# ---------------------------------------------------------------------------------------------
# Changes
# ---------------------------------------------------------------------------------------------


def changes_of_trees(parts: Iterable[Part], instead: Iterable[Any]) -> Iterator[Change]:
    """Nested dicts and lists with each value in each place."""
    for part in parts:
        for number, (_, key) in enumerate(slots_of(part.content)):
            for value in instead:
                what = f"{part.where}: {value!r} instead of {key!r}, slot {number}"
                yield what, partial(_with_slot, part, number, value)


def _with_slot(part: Part, number: int, value: Any) -> Files:
    tree = copy.deepcopy(part.content)
    node, key = slots_of(tree)[number]
    node[key] = value
    return part.put(tree)


_PUTS_AWAY = frozenset({b"\x94", b"q", b"r", b"p"})
_LEAVES_VALUE = _PUTS_AWAY | {
    opcode.code.encode("latin-1")
    for opcode in pickletools.opcodes
    if opcode.stack_after and opcode.stack_after[-1] is not pickletools.markobject
}
"""Opcodes after which a value lies on the top of the stack."""


def changes_of_pickles(parts: Iterable[Part]) -> Iterator[Change]:
    """Pickles with each value in the place of each that they have on their stacks."""
    for part in parts:
        codes = [raw for _, raw in opcodes(part.content)]
        for at, raw in enumerate(codes[:-1]):
            if raw[:1] not in _LEAVES_VALUE or codes[at + 1][:1] in _PUTS_AWAY:
                continue
            for kind, pushes in IN_PICKLES.items():
                changed = b"".join((*codes[: at + 1], b"0", pushes, *codes[at + 1 :]))
                yield f"{part.where}: {kind} after opcode {at}", partial(part.put, changed)


def _play(name: str, changes: Callable[[Files], Iterator[Change]], percent: int) -> int:
    """Try the changes of a checkpoint, or a share of them; how many."""
    import_late_modules()
    files = make_checkpoint(name)
    state = sound_state(files)
    step, count = max(100 // percent, 1), 0
    first = dice_of(f"fields {name}", 0).randrange(step)
    for what, change in islice(changes(files), first, None, step):
        count += 1
        with noted(f"{name}, {what}"):
            attempt(change(), state, by_command=False)
    return count


KINDS: dict[str, Callable[[Files], Iterator[Change]]] = {
    "json": lambda files: changes_of_trees(json_parts(files), IN_JSON),
    "headers": lambda files: changes_of_trees(header_parts(files), IN_JSON),
    "msgpack": lambda files: changes_of_trees(msgpack_parts(files), IN_MSGPACK),
    "pickles": lambda files: changes_of_pickles(pickle_parts(files)),
}
WITH: dict[str, tuple[str, ...]] = {
    "json": (
        "native", "megatron torch_dist", "megatron flattened", "megatron zarr", "zarr by zarr",
        "huggingface", "atorch by remesh",
    ),
    "headers": (
        "native", "native compressed", "huggingface", "diffusers", "safetensors",
        "atorch by remesh",
    ),
    "msgpack": ("native",),
    "pickles": (
        "torch_dcp", "megatron torch_dist", "megatron flattened", "torch.save", "huggingface",
        "diffusers", "paddle", "paddle flattened", "deepspeed zero 2", "deepspeed zero 3",
        "deepspeed universal", "atorch",
    ),
}  # fmt: skip
"""Checkpoints with such files."""


PERCENT = {"json": 100, "headers": 5, "msgpack": 10, "pickles": 1}
"""Share of the changes that is not left to the nightly runs."""


_CASES = [
    pytest.param(kind, name, percent, marks=mark)
    for kind, names in WITH.items()
    for name in names
    for percent, mark in ((PERCENT[kind], pytest.mark.slow), (share(), pytest.mark.nightly))
    if mark is pytest.mark.slow or PERCENT[kind] < 100
]


@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize(("kind", "name", "percent"), _CASES)
def test_each_field_may_be_of_any_type(
    kind: str, name: str, percent: int, covered: Callable[[str], None]
) -> None:
    count = _play(name, KINDS[kind], percent)
    assert count
    covered(f"seed {seed()}: {count} changes")
