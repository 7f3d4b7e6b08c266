"""remesh's own format: the commit record and the values document, sound and damaged."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from remesh.core import values
from remesh.core.integrity import hex_digest
from remesh.errors import (
    CorruptCheckpointError,
    DivergedReplicaError,
)
from remesh.formats import native
from remesh.formats.native import CommitRecord, FileRecord, ValuesDocument


def record_of(**changes: Any) -> CommitRecord:
    folder = native.data_folder("5f3a9c1e07b2")
    record = CommitRecord(
        format=native.FORMAT_NAME,
        version=native.FORMAT_VERSION,
        save_id="5f3a9c1e07b2",
        created="2024-02-29T12:00:00+00:00",
        world_size=2,
        remesh_version="0.1.0",
        index=FileRecord(path=f"{folder}/index.safetensors", num_bytes=4656, digest="0a" * 16),
        values=FileRecord(path=f"{folder}/values.msgpack", num_bytes=80, digest="1b" * 16),
        files=(FileRecord(path=f"{folder}/00001.safetensors", num_bytes=4100, digest="2c" * 16),),
        metadata={"step": 10, "note": "naïve", "loss": 0.1},
    )
    return msgspec.structs.replace(record, **changes)


def record_text(body: dict[str, object]) -> bytes:
    """A record of any content, with a digest that is right."""
    compact = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"record":%s,"digest":"%s"}' % (compact, hex_digest(compact).encode())


# ---------------------------------------------------------------------------------------------
# The commit record
# ---------------------------------------------------------------------------------------------


def test_white_space_between_the_words_of_a_record_does_not_count() -> None:
    record = record_of()
    text = native.encode_record(record)
    for indent in (None, 7):
        other = json.dumps(json.loads(text), indent=indent, ensure_ascii=False).encode()
        assert other != text
        assert native.decode_record(other, "f") == record


def test_fields_that_are_not_known_are_ignored() -> None:
    record = record_of()
    body = {**json.loads(msgspec.json.encode(record)), "later": [1, {"x": None}]}
    assert native.decode_record(record_text(body), "f") == record


@pytest.mark.parametrize("field", ["save_id", "index", "values", "files", "world_size"])
def test_a_record_that_lacks_a_field_is_corruption(field: str) -> None:
    body = json.loads(msgspec.json.encode(record_of()))
    del body[field]
    with pytest.raises(
        CorruptCheckpointError, match=r"(?s)f: incomplete commit record: .*" + field
    ):
        native.decode_record(record_text(body), "f")


# ---------------------------------------------------------------------------------------------
# The values document
# ---------------------------------------------------------------------------------------------


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(values.encode(value))


def test_paths_are_kept_only_where_the_name_does_not_say_them() -> None:
    document = ValuesDocument()
    for name, path in (("a.b", ("a", "b")), ("c.0", ("c", 0)), ("d.e", ("d.e",))):
        document.set_path(name, path)
        assert document.path_of(name) == path
    assert document.paths == {"c.0": ["c", 0], "d.e": ["d.e"]}
    assert document.path_of("x.y") == ("x", "y")


@pytest.mark.parametrize(
    "data", [b"", b"\x90", b"\x81\xa6values\x81\xa1\xff\xc0", b"\x81\xa6values" + b"\x91" * 200_000]
)
def test_what_is_no_document_is_corruption(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"^f: not a values file"):
        ValuesDocument.decode(data, "f")


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), ((1,), [1]), (0.0, -0.0)])
def test_values_of_other_types_differ(one: object, other: object) -> None:
    with pytest.raises(DivergedReplicaError):
        native.merge_documents([ValuesDocument(values={"v": raw(v)}) for v in (one, other)])


def test_keys_of_dicts_may_be_in_any_order() -> None:
    one = [{"a": 1, "b": {2: [], (3, 4): {"$": 5}}}]
    other = [{"b": {(3, 4): {"$": 5}, 2: []}, "a": 1}]
    merged = native.merge_documents([ValuesDocument(values={"v": raw(v)}) for v in (one, other)])
    assert merged.values["v"] == raw(one)
