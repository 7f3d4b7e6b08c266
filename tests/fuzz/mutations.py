"""Damage that knows the formats: which file is of what kind, and what may stand in it.

A file is changed as what it is (JSON, msgpack, a pickle, an archive, a safetensors file, columns of
an index) or as mere bytes. What is changed in a checkpoint of remesh gets, most of the time, the
sizes and digests that it would have had if it had been written so: the damage passes them, and what
lies behind them is tested.
"""

from __future__ import annotations

import json
import pickle
import random
import struct
from typing import Any

import msgspec
import numpy as np

from remesh.core.index import Index
from remesh.core.integrity import BLOCK_SIZE, block_digests, digest_of_digests, hex_digest
from remesh.core.packing import pack, unpack
from remesh.core.tables import decode_columns, encode_columns
from remesh.formats import native
from remesh.formats.decoding import decoded
from tests.campaigns.test_damage import DAMAGES
from tests.fuzz.files import Files, in_memory
from tests.fuzz.pickles import change_archive, change_pickle
from tests.fuzz.trees import EXTREME_INTS, Change, any_value, change_json, change_msgpack, to_json

_RECORD = native.RECORD_NAME


def damaged(right: Files, other: Files, dice: random.Random) -> tuple[Files, str]:
    """A copy of a checkpoint with a few places other than before, and what was done to it.

    Some files are taken from the other one.
    """
    files, done = dict(right), []
    # Python's own unpickler may run for ever on what was damaged, or do anything else.
    sound = right.get(".metadata")
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        path = dice.choice(sorted(files) or [""])
        kind = dice.random()
        if kind < 0.12 and files.get(path):
            damage = dice.choice(DAMAGES)
            damage(files, path, dice)
            done.append(f"{damage.__name__} {path}")
        elif kind < 0.15:
            name = dice.choice(sorted(other))
            files[dice.choice((path or name, name))] = other[name]  # there may be no file left
            done.append(f"take {name}")
        elif kind < 0.25 and sound is not None and files.get(".metadata") == sound:
            done.append(_change_distcp(files, dice))
            sound = files[".metadata"]
        elif files.get(path):
            try:
                files[path] = change_of(path, files[path])(files[path], dice)
            except Exception:  # noqa: BLE001 - it was damaged before, and is no longer of its kind
                files[path] = flipped(files[path], dice)
            done.append(f"change {path}")
    if _RECORD in files and dice.random() < 0.9:
        done.append(forge(files, dice))
    return files, ", ".join(done)


def change_of(path: str, content: bytes) -> Change:
    """How a file is changed as what it is."""
    name = path.rpartition("/")[2]
    if name == _RECORD:
        return _change_record
    if name.startswith("index") and name.endswith(".safetensors"):
        return _change_index
    if name.endswith(".msgpack"):
        return change_msgpack
    if content[:1] in {b"{", b"["}:
        return change_json
    if content[:2] == b"PK":
        return flipped if name.endswith(".distcp") else change_archive
    if content[:1] == b"\x80":
        return change_pickle
    if content[8:9] == b"{":
        return _change_safetensors
    return flipped


def flipped(content: bytes, dice: random.Random) -> bytes:
    """With other bits, or another number."""
    changed = bytearray(content or b"\0")
    at = dice.randrange(len(changed))
    if dice.random() < 0.5:
        changed[at] ^= 1 << dice.randrange(8)
    else:
        number = dice.choice(EXTREME_INTS) % (1 << 64)
        changed[at : at + 8] = number.to_bytes(8, "little")
    return bytes(changed)


# ---------------------------------------------------------------------------------------------
# Files of one kind
# ---------------------------------------------------------------------------------------------


def _change_safetensors(content: bytes, dice: random.Random) -> bytes:
    """A safetensors file with another header."""
    (length,) = struct.unpack_from("<Q", content)
    header, data = content[8 : 8 + length], content[8 + length :]
    document = json.loads(header)
    pieces = document.get("__metadata__", {}).get("pieces")
    if pieces is not None and dice.random() < 0.4:
        document["__metadata__"]["pieces"] = change_json(pieces.encode(), dice).decode()
        changed = to_json(document)
    else:
        changed = change_json(header, dice)
    if dice.random() < 0.3:
        # Padded as before, so that the data stays where it was.
        changed = changed.ljust(length)
    told = len(changed)
    if dice.random() < 0.1:
        told = dice.choice(EXTREME_INTS) % (1 << 64)
    return struct.pack("<Q", told) + changed + data


def _change_record(content: bytes, dice: random.Random) -> bytes:
    """A commit record that says something else, with the digest that it then has."""
    document = json.loads(content)
    if dice.random() < 0.1:
        return change_json(content, dice)
    body = change_json(json.dumps(document["record"]).encode(), dice)
    return record_file(body)


def record_file(body: bytes) -> bytes:
    """A commit record with its digest, given its JSON."""
    try:
        compact = msgspec.json.format(body, indent=-1)
    except (msgspec.MsgspecError, RecursionError):
        compact = body
    return b'{"record":' + compact + b',"digest":"' + hex_digest(compact).encode() + b'"}'


def _change_index(content: bytes, dice: random.Random) -> bytes:
    """An index with other columns, well-formed as a file."""
    if dice.random() < 0.15:
        return _change_safetensors(content, dice)
    kind = dice.choice(("words", "numbers"))
    columns, metadata = decode_columns(content, "index")
    packed = [name for name, column in columns.items() if column.dtype == np.int64]
    if kind == "numbers":
        columns |= {name: unpack(columns[name], 1 << 20) for name in packed}
    for _ in range(dice.choice((1, 1, 2, 3))):
        if dice.random() < 0.25:
            key = dice.choice(sorted(metadata))
            if metadata[key][:1] in {"[", "{"}:
                metadata[key] = change_json(metadata[key].encode(), dice).decode()
            else:
                metadata[key] = str(
                    dice.choice((*EXTREME_INTS, "x", "1e3", "9" * 5000, any_value(dice)))
                )
        else:
            name = dice.choice(sorted(columns))
            columns[name] = _change_column(columns, name, dice)
    if kind == "numbers":
        columns |= {name: pack(columns[name].reshape(-1).astype(np.int64)) for name in packed}
    return encode_columns(columns, metadata)


def _change_column(columns: dict[str, Any], name: str, dice: random.Random) -> Any:
    column = columns[name].copy()
    kind = dice.randrange(10)
    if kind == 0:
        other = columns[dice.choice(sorted(columns))]
        return other.copy()
    if kind == 1:
        return column[: dice.randrange(len(column) + 1)]
    if kind == 2:
        return np.concatenate([column, column])
    if kind == 3:
        return column.astype(dice.choice(("<i8", "<u8", "<i4", "|u1")))
    if kind == 4:
        return column.reshape(dice.choice(((-1,), (1, -1), (-1, 1), (1, 1, -1))))
    if kind == 5:
        dice.shuffle(rows := list(range(len(column))))
        return column[rows]
    flat = column.reshape(-1)
    if flat.size:
        at = dice.randrange(flat.size)
        old = int(flat[at])
        number = dice.choice((old + 1, old - 1, old * 2, -old, dice.choice(EXTREME_INTS)))
        bits = column.dtype.itemsize * 8
        flat[at] = np.array([number % (1 << bits)], f"<u{bits // 8}").view(column.dtype)[0]
    return column


def forge(files: Files, dice: random.Random) -> str:
    """Give a checkpoint of remesh the sizes and digests that its files now have."""
    try:
        record = json.loads(files[_RECORD])["record"]
        folder = f"data-{record['save_id']}/"
        _forge_blocks(files, record, dice)
        for entry in (record["index"], record["values"]):
            content = files[entry["path"]]
            entry |= {"num_bytes": len(content), "digest": hex_digest(content)}
    except Exception as error:  # noqa: BLE001 - there is nothing left that could be forged
        return f"not forged: {type(error).__name__}"
    files[_RECORD] = record_file(to_json(record))
    return f"forged {folder}"


def _forge_blocks(files: Files, record: Any, dice: random.Random) -> None:
    """Digests of the blocks of data files in the index, and of those in the record."""
    path = record["index"]["path"]
    columns, metadata = decode_columns(files[path], "index")
    stored = json.loads(metadata["remesh.files"])
    if dice.random() < 0.5:
        blocks, first = [], [0]
        for file, held in zip(stored, _contents(files, columns, metadata), strict=True):
            file[1] = len(held)
            blocks.append(block_digests(np.frombuffer(held, np.uint8)))
            first.append(first[-1] + len(blocks[-1]))
        columns["block.digest"] = np.concatenate(blocks) if blocks else np.zeros((0, 2), np.uint64)
        columns["block.first"] = pack(np.array(first, np.int64))
        metadata |= {"remesh.files": json.dumps(stored), "remesh.block_size": str(BLOCK_SIZE)}
        files[path] = encode_columns(columns, metadata)
    bounds = unpack(columns["block.first"], 1 << 20).tolist()
    for entry, start, stop in zip(record["files"], bounds, bounds[1:], strict=False):
        content = files.get(entry["path"])
        digest = digest_of_digests(columns["block.digest"][start:stop])
        entry |= {"digest": digest}
        if content is not None:
            entry["num_bytes"] = len(content)


def _contents(files: Files, columns: dict[str, Any], metadata: dict[str, str]) -> list[bytes]:
    """What the data files hold; the index gets the sizes that compressed ones have."""
    paths = [path for path, _ in json.loads(metadata["remesh.files"])]
    if "file.num_bytes" not in columns:
        return [files[path] for path in paths]
    columns["file.num_bytes"] = pack(np.array([len(files[path]) for path in paths]))
    index = Index.decode(encode_columns(columns, metadata), "index")
    storage = decoded(in_memory(files), index)
    return [storage.read(path) for path in paths]


# ---------------------------------------------------------------------------------------------
# Checkpoints of torch.distributed.checkpoint
# ---------------------------------------------------------------------------------------------


def _change_distcp(files: Files, dice: random.Random) -> str:
    """Another archive for one chunk or value, or other numbers in the metadata's objects."""
    try:
        metadata = pickle.loads(files[".metadata"])
        places = list(metadata.storage_data.items())
        index, info = dice.choice(places)
        if dice.random() < 0.5:
            content = files[info.relative_path]
            archive = content[info.offset : info.offset + info.length]
            changed = change_archive(archive, dice)
            files[info.relative_path] = content + changed
            info.offset, info.length = len(content), len(changed)
            what = f"archive of {index.fqn}"
        else:
            what = _change_object(metadata, dice)
        files[".metadata"] = pickle.dumps(metadata, protocol=dice.choice((2, 4)))
    except Exception as error:  # noqa: BLE001 - the archive was damaged before
        return f"not changed: {type(error).__name__}"
    return what


def _change_object(metadata: Any, dice: random.Random) -> str:
    """One attribute of an object in the metadata."""
    objects = [metadata, *metadata.storage_data.values(), *metadata.state_dict_metadata.values()]
    for entry in metadata.state_dict_metadata.values():
        chunks = getattr(entry, "chunks", [])
        objects += [*chunks, *(chunks and [entry.properties])]
    chosen = dice.choice(objects)
    name = dice.choice(sorted(vars(chosen)))
    old = getattr(chosen, name)
    if isinstance(old, tuple) and old:
        number = dice.choice((*EXTREME_INTS[:19], old[0] + 1, old[0] * 2))
        new: Any = dice.choice(((number, *old[1:]), old[1:], (*old, number), ()))
    elif isinstance(old, dict) and old:
        key = dice.choice(list(old))
        new = dict(old)
        new[dice.choice((key, "x", 1))] = dice.choice(
            (any_value(dice), dice.choice(list(old.values())))
        )
    elif isinstance(old, list) and old:
        new = dice.choice((old[1:], [*old, *old], old * 50, []))
    else:
        new = any_value(dice)
    object.__setattr__(chosen, name, new)
    return f"{type(chosen).__name__}.{name}"
