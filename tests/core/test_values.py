"""Values: what goes in comes out, what cannot is refused by name, and hostile bytes do nothing."""

from __future__ import annotations

import argparse
import datetime as dt
import enum
import fractions
import math
import pathlib
import subprocess
import sys
import types
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import remesh
from remesh.core.dtypes import BY_NAME, DTYPES
from remesh.core.values import UnresolvedValue, decode, encode, encode_object, is_plain
from remesh.errors import CorruptCheckpointError, StateError, UnsupportedValueError
from remesh.storage import MemoryStorage
from tests.formats.test_hostile_pickles import VALUE_TYPES
from tests.fuzz.trees import KINDS


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Kind(enum.StrEnum):
    A = "a"


class Bits(enum.Flag):
    ONE = 1
    TWO = 2


class Point(NamedTuple):
    x: int
    y: object


class Marked(torch.Tensor):
    """A tensor that may mean something else than its elements."""


class Outer:
    class Inner(enum.Enum):
        MEMBER = "m"


def namespace(attributes: dict[str, object]) -> argparse.Namespace:
    made = argparse.Namespace()
    vars(made).update(attributes)
    return made


def round_trip(value: object) -> Any:
    assert is_plain(value)
    return decode(encode(value))


def same(a: Any, b: Any) -> bool:
    """Equal in type and content at every depth; NaN equals NaN, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(x, y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


# ---------------------------------------------------------------------------------------------
# Round trips
# ---------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    TEXT,
    st.binary(),
    st.sampled_from([Color.RED, Level.LOW, Kind.A]),
    st.tuples(st.integers(), TEXT),
    st.dates(),
)
LEAVES = st.one_of(
    HASHABLE,
    st.floats(),
    st.complex_numbers(),
    st.times(),
    st.timedeltas(),
    st.datetimes(timezones=st.none() | st.just(dt.UTC)),
    st.sets(HASHABLE, max_size=4),
    st.frozensets(HASHABLE, max_size=4),
    TEXT.filter(lambda text: "\0" not in text).map(pathlib.Path),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(TEXT | st.just("$"), inner, max_size=4),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.builds(Point, st.integers(), inner),
        st.dictionaries(TEXT, inner, max_size=3).map(
            lambda fields: types.SimpleNamespace(**fields)
        ),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_any_nest_of_plain_values_comes_back(value: object) -> None:
    back = round_trip(value)
    assert same(back, value)
    # Ranks compare encoded values, so nothing in them may depend on hashing or identity.
    assert encode(back) == encode(value)


PLAIN: list[Any] = [
    2**63 - 1,
    -(2**63),
    2**63,
    2**64,
    -(2**63) - 1,
    -(7**400),
    math.inf,
    -0.0,
    5e-324,
    {1: "int key", None: "none", (1, "a"): "tuple", 2.5: "float", b"b": "bytes"},
    {"$": "int", "v": "0x1"},
    {"$": {"$": 1}},
    {Kind.A: 1, "b": 2},
    {Color.RED: [Color.GREEN]},
    {1, 2**70, "a", None, (1, 2)},
    frozenset({frozenset(), frozenset({1})}),
    [],
    (),
    {},
    set(),
    b"\x00\xff",
    "\u0000 \U0001f600",
    dt.datetime(2024, 2, 29, 23, 59, 59, 999999),  # noqa: DTZ001
    dt.datetime(2024, 2, 29, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=45))),
    dt.time(1, 2, tzinfo=dt.UTC),
    dt.timedelta(days=-1, microseconds=1),
    Outer.Inner.MEMBER,
    Point(1, [Point(2, None)]),
    namespace({"self": 1, "lr": 0.1, "nested": argparse.Namespace(a=None)}),
    types.SimpleNamespace(a=(1, 2), self=None),
    pathlib.Path("/a/b c/ü"),
    complex(math.inf, -0.0),
    math.nan,
    complex(math.nan, 1),
]


def test_an_int_of_any_length() -> None:
    # Longer than Python turns into decimal text without being asked to.
    assert round_trip(-(10**5000)) == -(10**5000)


def test_a_time_zone_comes_back_as_its_offset() -> None:
    there = dt.datetime(2024, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    back = round_trip(there)
    assert back == there
    assert back.utcoffset() == dt.timedelta(hours=2)


def test_the_second_of_two_equal_times_comes_back_as_that() -> None:
    zone = ZoneInfo("Europe/Berlin")
    for fold in (0, 1):
        naive = dt.datetime(2024, 10, 27, 2, 30, fold=fold)  # noqa: DTZ001
        back = round_trip(naive)
        assert back.fold == fold
        assert back.replace(tzinfo=zone).timestamp() == naive.replace(tzinfo=zone).timestamp()
        assert round_trip(naive.time()).fold == fold


NUMPY_SCALARS: list[Any] = [
    np.float64(0.1),
    np.float32(-0.0),
    np.float16(65504),
    np.int8(-128),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 - 2j),
    np.str_("ä b"),
    np.str_(""),
    np.bytes_(b"x"),
    np.bytes_(b""),
]


TORCH_CONSTANTS: list[Any] = [
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    torch.Size([2, 3]),
    torch.Size([]),
]


def test_other_mappings_come_back_as_dicts_in_their_order() -> None:
    back = round_trip(OrderedDict([("z", 1), ("a", 2)]))
    assert type(back) is dict
    assert list(back) == ["z", "a"]


def test_set_order_does_not_show() -> None:
    # Their hashes collide, so each set lists first what was added first.
    ascending, descending = set([0, 8, 16]), set([16, 8, 0])  # noqa: C405
    assert encode(ascending) == encode(descending)


# ---------------------------------------------------------------------------------------------
# What cannot be stored
# ---------------------------------------------------------------------------------------------


class MyInt(int):
    pass


class MyList(list[int]):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        math,
        Color,
        fractions.Fraction(1, 3),
        MyInt(3),
        MyList([1]),
        bytearray(b"x"),
        np.zeros(2),
        np.datetime64("2024-01-01"),
        torch.zeros(2),
        Bits.ONE | Bits.TWO,
        Bits(0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_error_names_path_and_type(value: object) -> None:
    assert not is_plain(value)
    with pytest.raises(UnsupportedValueError) as caught:
        encode({"a": [0, {"b": value}]}, "optimizer.extra")
    message = str(caught.value)
    kind = type(value)
    assert message.startswith("optimizer.extra.a.1.b: ")
    assert f"{kind.__module__}.{kind.__qualname__}" in message
    assert "state_dict()" in message
    assert isinstance(caught.value, StateError)


@pytest.mark.parametrize("key", [10**5000, (10**5000,), frozenset({10**5000})], ids=type)
def test_keys_of_more_digits_than_python_prints(key: Any) -> None:
    state: dict[str, Any] = {"a": {key: 1}}
    assert decode(encode(state)) == state
    storage = MemoryStorage()
    remesh.save(state, storage)
    target = {"a": None}
    remesh.load(target, storage)
    assert target == state
    with pytest.raises(UnsupportedValueError, match=r"a value of type torch\.Tensor"):
        encode({key: torch.zeros(1)})


def test_keys_that_torch_cannot_print() -> None:
    key = torch.zeros(3, dtype=torch.uint8).view(torch.bits8)
    with pytest.raises(UnsupportedValueError, match=r"x\.a, key <torch.bits8 \(3,\)>: a value of"):
        encode({"a": {key: 1}}, "x")


def test_an_unsupported_key_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"^x, key .*MyInt") as caught:
        encode({MyInt(3): 1}, "x")
    assert "key 3" in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["\ud800", {"\udc80": 1}, pathlib.Path("/a\udcff"), {"\ud800"}, [("", "\ud800")]],
    ids=ascii,
)
def test_text_that_is_not_unicode_is_refused(value: object) -> None:
    assert not is_plain(value)
    with pytest.raises(UnsupportedValueError, match=r"^rng: the text '.*' is not valid Unicode"):
        encode(value, "rng")


# ---------------------------------------------------------------------------------------------
# What cannot be resolved
# ---------------------------------------------------------------------------------------------


def raw(kind: object, payload: object) -> bytes:
    return msgspec.msgpack.encode({"$": kind, "v": payload})


@pytest.mark.parametrize(
    ("kind", "type_name", "payload", "expected"),
    [
        ("enum", "not_imported.module.Color", "RED", "RED"),
        ("enum", f"{__name__}.Color", "BLUE", "BLUE"),
        ("enum", f"{__name__}.Gone", "RED", "RED"),
        ("enum", f"{__name__}.Point", "x", "x"),
        ("enum", "NoModule", "RED", "RED"),
        ("namedtuple", "not_imported.Point", [1, {"$": "tuple", "v": []}], [1, ()]),
        ("namedtuple", f"{__name__}.Point", [1], [1]),
        ("namedtuple", "builtins.tuple", [1], [1]),
        ("namedtuple", "builtins.list", [], []),
    ],
)
def test_a_type_that_is_not_known_is_shown(
    kind: str, type_name: str, payload: object, expected: object
) -> None:
    found = decode(raw(kind, [type_name, payload]))
    assert found == UnresolvedValue(kind, type_name, expected)


def test_a_kind_of_a_later_version_is_shown() -> None:
    assert decode(raw("jax.dtype", "f8")) == UnresolvedValue("jax.dtype", "jax.dtype", "f8")
    assert decode(raw("torch.Tag", "x")) == UnresolvedValue("torch.Tag", "torch.Tag", "x")


@pytest.mark.parametrize("name", ["os", "load", "_C", "nn", "onnx", "zeros", "__doc__", "nothing"])
def test_a_torch_name_that_is_no_constant_is_not_handed_out(name: str) -> None:
    constants = ("torch.dtype", "torch.layout", "torch.memory_format")
    for kind in (*constants, "torch.module", "torch.type", "torch.builtin_function_or_method"):
        expected = UnresolvedValue(kind, kind, f"torch.{name}")
        assert decode(raw(kind, f"torch.{name}")) == expected


def test_looking_up_a_type_never_imports_a_module() -> None:
    # A lazy module imports when it is asked for an attribute; the program below would notice.
    program = """
import sys, types
class Lazy(types.ModuleType):
    def __getattr__(self, name):
        raise SystemExit("asked for " + name)
sys.modules["lazy"] = Lazy("lazy")
import msgspec
from remesh.core.values import decode, UnresolvedValue
for kind in ("enum", "namedtuple"):
    for name in ("lazy.Type", "lazy.sub.Type", "remesh.save.Type", "json.tool.Type"):
        found = decode(msgspec.msgpack.encode({"$": kind, "v": [name, []]}))
        assert isinstance(found, UnresolvedValue) or kind == "enum", found
loaded = set(sys.modules) & {"torch", "remesh.checkpoint", "json.tool"}
assert not loaded, loaded
found = decode(msgspec.msgpack.encode({"$": "torch.dtype", "v": "torch.float32"}))
assert found == UnresolvedValue("torch.dtype", "torch.dtype", "torch.float32")
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------
# Hostile bytes
# ---------------------------------------------------------------------------------------------

HARMLESS = (*VALUE_TYPES, list, tuple, dict, set, frozenset, enum.Enum)


def decode_hostile(data: bytes) -> None:
    """Decode; the only error is ours, and no function, module or type comes out."""
    try:
        found = [decode(data)]
    except CorruptCheckpointError:
        return
    while found:
        value = found.pop()
        assert isinstance(value, HARMLESS), value
        if isinstance(value, dict):
            found += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            found += value
        elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
            found += vars(value).values()


JSON_LIKE = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        TEXT,
        st.binary(max_size=20),
        st.sampled_from(
            ["builtins.eval", "os.system", "torch.load", "enum.Enum", "(1,i4", "<f8", "O", "nan"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(TEXT | st.sampled_from(["$", "v"]), inner, max_size=4),
        st.fixed_dictionaries({"$": st.sampled_from(KINDS) | inner, "v": inner}),
    ),
    max_leaves=8,
)


@given(st.binary(max_size=200))
@example(b"\x91" * 200_000)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xd6\xff\x00\x00\x00\x00")
@example(b"\xd4\x05\x00")
@example(b"")
def test_random_bytes_do_nothing(data: bytes) -> None:
    decode_hostile(data)


@given(st.sampled_from(KINDS), JSON_LIKE)
@example("numpy", ["(1,i4", b"1234"])
@example("numpy", ["<f8", b"123"])
@example("numpy", ["|O8", b"12345678"])
@example("timedelta", [2**62, 0, 0])
@example("torch.device", "nonsense")
@example("torch.Size", {"a": 1})
@example("torch.Size", [2**64 - 1])
@example("int", "9" * 10_000)
@example("int", 5)
@example("enum", [5, 5])
@example("argparse.Namespace", [["a", 1]])
@example("argparse.Namespace", {"$": "dict", "v": [[1, 2]]})
@example("set", [[1]])
@example("dict", [[[1], 1]])
def test_well_formed_nonsense_does_nothing(kind: str, payload: object) -> None:
    decode_hostile(raw(kind, payload))


@given(VALUES, st.data())
def test_damaged_encodings_do_nothing(value: object, data: st.DataObject) -> None:
    damaged = bytearray(encode(value))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    decode_hostile(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    decode_hostile(bytes(damaged))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (5, 1),
        (None, 1),
        ("int", "12z"),
        ("datetime", "yesterday"),
        ("time.fold", 3),
        ("dict", 3),
        ("numpy", ["<f8"]),
    ],
)
def test_malformed_payloads_are_corruption(kind: object, payload: object) -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be decoded"):
        decode(raw(kind, payload))


def test_a_tag_without_payload_is_corruption() -> None:
    with pytest.raises(CorruptCheckpointError, match="cannot be decoded"):
        decode(msgspec.msgpack.encode({"$": "tuple"}))


def test_namedtuples_of_the_old_kind() -> None:
    pair = namedtuple("pair", "a b")  # noqa: PYI024
    pair.__module__, pair.__qualname__ = "nowhere", "pair"
    assert round_trip(pair(1, 2)) == UnresolvedValue("namedtuple", "nowhere.pair", [1, 2])


@pytest.mark.parametrize("name", [dtype.name for dtype in DTYPES if dtype.is_opaque])
def test_tensors_that_torch_does_not_copy_are_encoded_by_their_bytes(name: str) -> None:
    raw = torch.arange(6 * BY_NAME[name].itemsize, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, name)).reshape(2, 3)
    for source in (tensor, tensor.t()):
        found = decode(encode_object(source))
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape) == (source.dtype, source.shape)
        same_size = torch.uint8 if source.itemsize == 1 else torch.uint16
        assert torch.equal(found.view(same_size), source.view(same_size))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_in_objects_are_what_they_show_or_refused() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for view in (numbers.conj(), numbers.conj().imag):
        found = decode(encode_object({"x": view}))
        assert isinstance(found, dict)
        assert torch.equal(found["x"], view)
    for more, kind in (
        (torch.ones(2).as_subclass(Marked), "Marked"),
        (torch.empty(2, device="meta"), "Tensor"),
        (torch.nested.nested_tensor([torch.ones(2)]), "Tensor"),
        (np.ma.array([1, 2], mask=[False, True]), "MaskedArray"),
    ):
        with pytest.raises(UnsupportedValueError, match=rf"x: a value of type .*\.{kind}"):
            encode_object(more, "x")
    with pytest.raises(UnsupportedValueError, match=r"x: a value of type .*\.MaskedArray"):
        remesh.save({"x": more}, MemoryStorage())


def test_what_is_not_known_shows_its_type() -> None:
    assert repr(UnresolvedValue("torch.dtype", "torch.dtype", "torch.new8")) == "torch.new8"
    assert repr(UnresolvedValue("enum", "train.Mode", "torch.x")) == "train.Mode('torch.x')"
