"""Headers: readable by the safetensors library, and errors for what is no header."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remesh.core.safetensors_file import (
    ALIGNMENT,
    decode_header,
    encode_header,
)
from remesh.errors import CorruptCheckpointError

ITEMSIZES = {"F32": 4, "I64": 8, "U8": 1, "BOOL": 1, "F64": 8}
Tensors = list[tuple[str, str, list[int], int]]


@st.composite
def tensor_lists(draw: st.DrawFn) -> Tensors:
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    tensors = []
    for name in draw(st.lists(names.filter(lambda n: n != "__metadata__"), unique=True)):
        code = draw(st.sampled_from(sorted(ITEMSIZES)))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        tensors.append((name, code, shape, int(np.prod(shape, dtype=int)) * ITEMSIZES[code]))
    return sorted(tensors, key=lambda tensor: -ITEMSIZES[tensor[1]])


METADATA = st.dictionaries(
    st.text("abc.", max_size=4), st.text('xyz"\\ü\n', max_size=8), max_size=3
)


@given(tensor_lists(), METADATA)
def test_what_is_encoded_is_decoded(tensors: Tensors, metadata: dict[str, str]) -> None:
    data, positions = encode_header(tensors, metadata)
    assert len(data) % ALIGNMENT == 0
    header = decode_header(data, "f")
    assert (header.metadata, header.data_start) == (metadata, len(data))
    assert list(header.entries) == [name for name, _, _, _ in tensors]
    begin = len(data)
    for (name, code, shape, num_bytes), position in zip(tensors, positions, strict=True):
        entry = header.entries[name]
        assert position == begin == header.data_start + entry.data_offsets[0]
        begin += num_bytes
        assert entry.data_offsets[1] == begin - header.data_start
        assert (entry.dtype, entry.shape) == (code, shape)


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


ENTRY = '"dtype":"U8","shape":[1],"data_offsets":[0,1]'


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 7,
        framed(b""),
        framed(b"null"),
        framed(b"[]"),
        framed(b'{"a":1}'),
        framed(b'{"a":{}}'),
        framed(f'{{"a":{{{ENTRY}}}'.encode()),
        framed(f'{{"a\xff":{{{ENTRY}}}}}'.encode("latin-1")),
        framed(b'{"__metadata__":null}'),
        framed(b'{"__metadata__":{"a":1}}'),
        framed(f'{{"a":{{{ENTRY.replace("[1]", "[-1]")}}}}}'.encode()),
        framed(f'{{"a":{{{ENTRY.replace("[0,1]", "[0,-1]")}}}}}'.encode()),
        framed(f'{{"a":{{{ENTRY.replace("[0,1]", "[0]")}}}}}'.encode()),
        framed(f'{{"a":{{{ENTRY.replace("[1]", f"[{2**64}]")}}}}}'.encode()),
        framed(f'{{"a":{{{ENTRY.replace("[1]", "[1.5]")}}}}}'.encode()),
        framed(b'{"a":' + b"[" * 200_000),
        framed(f'{{"a":{{{ENTRY}}}}}   '.encode())[:-1],
    ],
)
def test_what_is_no_header_is_corruption(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^some/file: "):
        decode_header(data, "some/file")


@given(st.binary(max_size=80))
def test_random_bytes_are_corruption_or_a_header(data: bytes) -> None:
    for candidate in (data, framed(data), framed(b'{"a":' + data + b"}")):
        try:
            header = decode_header(candidate, "f")
        except CorruptCheckpointError:
            continue
        assert header.data_start <= len(candidate)
