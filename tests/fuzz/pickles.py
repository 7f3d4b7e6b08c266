"""Changing pickles opcode by opcode, and the archives of `torch.save` around them."""

from __future__ import annotations

import io
import pickletools
import random
import struct
import zipfile

from tests.formats import hostile
from tests.fuzz.trees import EXTREME_INTS, ODD_TEXTS

BURDENS = (*hostile.burdens().values(),)


def _anything(dice: random.Random) -> bytes:
    """Opcodes that push one value, or nearly so."""
    return dice.choice(BURDENS) if dice.random() < 0.3 else hostile.piece(dice, 2)


def opcodes(data: bytes) -> list[tuple[str, bytes]]:
    """Name and bytes of each opcode, frames left out."""
    found = list(pickletools.genops(data))
    ends = [position for _, _, position in found[1:]] + [len(data)]
    return [
        (opcode.name, data[position:end])
        for (opcode, _, position), end in zip(found, ends, strict=True)
        if opcode.name != "FRAME"
    ]


def change_pickle(data: bytes, dice: random.Random) -> bytes:
    """A pickle with a few opcodes other than before."""
    codes = opcodes(data)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        at = dice.randrange(1, max(len(codes) - 1, 2))
        name, raw = codes[at]
        kind = dice.randrange(10)
        if kind == 0:
            del codes[at]
        elif kind == 1:
            codes.insert(at, codes[dice.randrange(len(codes))])
        elif kind == 2:
            codes.insert(at, ("", dice.choice(hostile.OPCODES)))
        elif kind == 3:
            codes.insert(at, ("", _anything(dice)))
        elif kind == 4:
            other = dice.randrange(1, len(codes))
            codes[at], codes[other] = codes[other], codes[at]
        elif "INT" in name or name in {"LONG1", "LONG4"}:
            codes[at] = (name, hostile.number(dice.choice(EXTREME_INTS)))
        elif "UNICODE" in name or name == "BINSTRING":
            texts = [code for code in codes if code[0] == name]
            codes[at] = dice.choice(
                (dice.choice(texts), (name, hostile.text(dice.choice(ODD_TEXTS))))
            )
        elif name in {"GLOBAL", "STACK_GLOBAL"}:
            codes[at] = (name, raw if kind < 6 else hostile.any_name(dice))
        else:
            codes[at] = ("", _anything(dice))
    return b"".join(raw for _, raw in codes)


# ---------------------------------------------------------------------------------------------
# Archives
# ---------------------------------------------------------------------------------------------


def change_archive(data: bytes, dice: random.Random) -> bytes:
    """An archive of `torch.save` with another pickle in it, or with other entries."""
    if dice.random() < 0.3:
        return _change_directory(data, dice)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    method = zipfile.ZIP_STORED
    kind = dice.randrange(10)
    name = dice.choice(sorted(entries))
    if kind < 7:
        name = next(name for name in entries if name.endswith("data.pkl"))
        entries[name] = change_pickle(entries[name], dice)
    elif kind == 7:
        del entries[name]
    elif kind == 8:
        entries[dice.choice((name + "x", "other/data.pkl", "../x", "archive/data/0"))] = entries[
            name
        ]
    else:
        method = zipfile.ZIP_DEFLATED
        entries[name] = bytes(dice.choice((10, 30 << 20)))
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method, compresslevel=1) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return made.getvalue()


def _change_directory(data: bytes, dice: random.Random) -> bytes:
    """An archive with another number somewhere in a header."""
    heads = [
        at
        for magic in (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
        for at in _all(data, magic)
    ]
    content = bytearray(data)
    for _ in range(dice.choice((1, 1, 2))):
        at = dice.choice(heads) + 2 * dice.randrange(2, 23)
        code = dice.choice(("<H", "<I", "<Q"))
        limit = 1 << 8 * struct.calcsize(code)
        number = dice.choice((dice.choice(EXTREME_INTS) % limit, dice.randrange(len(data)) % limit))
        if at + struct.calcsize(code) <= len(content):
            struct.pack_into(code, content, at, number)
    return bytes(content)


def _all(data: bytes, magic: bytes) -> list[int]:
    found, at = [], data.find(magic)
    while at >= 0:
        found.append(at)
        at = data.find(magic, at + 1)
    return found
