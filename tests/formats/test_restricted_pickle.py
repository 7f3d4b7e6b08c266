"""Pickles are read by our own table of names: nothing that they ask for runs."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import enum
import pathlib
import pickle
import pickletools
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remesh.core.values import UnresolvedValue
from remesh.errors import CorruptCheckpointError, PickleRefusedError
from remesh.formats import pickle_writer
from remesh.formats.pickle_reader import parse
from remesh.formats.pickle_records import Record
from remesh.formats.restricted_pickle import loads, resolved
from tests.formats.hostile import text


def read(data: bytes, *, allow: tuple[str, ...] = (), lenient: bool = False) -> Any:
    pickled = parse(data, "file") if lenient else loads(data, "file", allow=allow)
    return resolved(pickled, "file", allow=allow)


class _Reduced:
    """Pickles as a call of anything."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


PLAIN = {
    "list": [1, -(2**70), 2.5, True, None, "text", b"bytes"],
    "tuple": (1, (2, ())),
    "set": {1, 2},
    "frozenset": frozenset({"a"}),
    "complex": 1 + 2j,
    "slice": slice(1, 2),
    "bytearray": bytearray(b"ab"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "defaultdict": collections.defaultdict(int, {"a": 1}),
    "date": dt.datetime(2024, 5, 6, tzinfo=dt.UTC),
    "path": pathlib.PurePosixPath("a/b"),
    "namespace": argparse.Namespace(lr=0.1, inner=types.SimpleNamespace(x=[1])),
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "device": torch.device("cuda", 1),
}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_as_they_were(protocol: int) -> None:
    found = read(pickle.dumps(PLAIN, protocol))
    assert found.pop("path") == pathlib.Path("a/b")
    assert found == {name: value for name, value in PLAIN.items() if name != "path"}
    assert type(found["ordered"]) is collections.OrderedDict
    assert type(found["defaultdict"]) is dict  # what makes its missing items is code
    assert type(found["namespace"]) is argparse.Namespace


class Level(enum.IntEnum):
    LOW = 1


def test_members_of_enums_that_the_program_has_imported() -> None:
    data = pickle.dumps([Level.LOW, Level.LOW], 2)
    assert read(data, lenient=True) == [Level.LOW, Level.LOW]
    assert type(read(data, lenient=True)[0]) is Level
    # Values that it does not have, and what is no enum, are refused.
    for other in (data.replace(b"K\x01", b"K\x02"), pickle.dumps(_Reduced(Other, 1), 2)):
        found = read(other, lenient=True)
        refused = found[0] if isinstance(found, list) else found
        assert isinstance(refused, UnresolvedValue), found


class Other(int):
    """Not an enum."""


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_numpy_arrays_and_scalars(protocol: int) -> None:
    arrays: list[np.ndarray[Any, Any]] = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1),
        np.array(["a", "bc"]),
        np.array([True, False]),
        np.zeros((0, 2)),
        np.arange(3, dtype=">i4"),
        np.zeros((0, 2), ">f8"),
    ]
    found = read(pickle.dumps([*arrays, np.float64(2.5), np.int8(-3)], protocol))
    for array, expected in zip(found, arrays, strict=False):
        native = expected.dtype.newbyteorder("=")  # no other can be stored
        assert (array.dtype, array.shape) == (native, expected.shape)
        np.testing.assert_array_equal(array, expected)
    assert found[-2:] == [2.5, -3]


@settings(max_examples=30)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_what_the_writer_writes_python_reads_too(value: Any) -> None:
    data = pickle_writer.dumps(value)
    assert pickle.loads(data) == value
    assert read(data) == value


@pytest.mark.parametrize(
    "target",
    ["cargparse\nNamespace\n", "ctorch\nSize\n", "ctorch\nFloatStorage\n", "ctorch\nfloat32\n"],
)
def test_a_pickle_cannot_change_what_names_stand_for(target: str) -> None:
    for state in (b"(N}" + text("call") + b"Nst", b"}" + text("call") + b"Ns", b"(NN(NNt)t"):
        data = target.encode() + state + b"b."
        with pytest.raises(CorruptCheckpointError, match="a state for what takes none"):
            loads(data, "file")
    assert read(pickle.dumps(PLAIN["namespace"])) == PLAIN["namespace"]
    assert read(pickle.dumps(torch.Size([1]))) == torch.Size([1])


def test_a_refused_class_is_named_with_the_way_to_allow_it() -> None:
    data = pickle.dumps({"seen": collections.ChainMap({"a": 1}), "kept": 1})
    with pytest.raises(PickleRefusedError) as caught:
        loads(data, "run/common.pt")
    assert caught.value.type_name == "collections.ChainMap"
    assert "run/common.pt" in str(caught.value)
    assert "allow=['collections.ChainMap']" in str(caught.value)

    found = read(data, lenient=True)
    assert found["kept"] == 1
    assert found["seen"].type_name == "collections.ChainMap"
    assert isinstance(found["seen"], UnresolvedValue)

    allowed = read(data, allow=("collections.ChainMap",))
    assert allowed == {"seen": collections.ChainMap({"a": 1}), "kept": 1}


def test_arrays_of_objects_are_refused() -> None:
    for array in (np.array([object(), None])[1:], np.array(["2026-01-01"], "M8[D]")):
        found = read(pickle.dumps({"array": array, "kept": 1}), allow=("builtins.object",))
        assert (found["array"].kind, found["kept"]) == ("pickle", 1)
        assert "by torch.load" in found["array"].payload, "there is no name to allow"


def test_cycles_end() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    found = read(pickle.dumps({"loop": loop, "kept": 2}))
    assert found["kept"] == 2
    assert "holds itself" in found["loop"][1].payload


def test_the_writer_names_nothing_of_ours() -> None:
    call = Record("torch.Size", ((1, 2),))
    data = pickle_writer.dumps({"a": call, "b": call})
    named = [arg for opcode, arg, _ in pickletools.genops(data) if opcode.name == "GLOBAL"]
    assert named == ["torch Size"]
    assert pickle.loads(data) == {"a": torch.Size([1, 2]), "b": torch.Size([1, 2])}
    with pytest.raises(TypeError, match="object"):
        pickle_writer.dumps([object()])
