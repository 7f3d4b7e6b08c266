"""Every ordinary kind of state through a real save and load, in one process and one directory."""

from __future__ import annotations

import math
import types
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import remesh
from remesh.core.geometry import Box
from tests.core.test_values import NUMPY_SCALARS, PLAIN, TORCH_CONSTANTS, same
from tests.engine.bits import TORCH_DTYPES, bits_of, bits_of_all, random_tensor, zeros_like

SHAPES = {"matrix": (5, 7), "scalar": (), "empty": (0, 3), "deep": (2, 1, 3, 1, 2)}


def load_exactly(target: Any, path: Path) -> Any:
    """Load everything that is stored, and no more."""
    report = remesh.load(target, path, unexpected="error")
    assert (report.missing, report.cast, report.resized) == ((), {}, {})
    return target


# ---------------------------------------------------------------------------------------------
# Tensors and arrays
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_shape_and_region_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    source = {name: random_tensor(dtype, shape) for name, shape in SHAPES.items()}
    remesh.save(source, tmp_path)
    target = {name: zeros_like(tensor) for name, tensor in source.items()}
    before = dict(target)
    assert load_exactly(target, tmp_path) is target
    for name, tensor in before.items():
        assert target[name] is tensor
    checkpoint = remesh.Checkpoint(tmp_path)
    read = {name: checkpoint.read(name) for name in source}
    for found in (target, read, checkpoint.state()):
        assert bits_of_all(found) == bits_of_all(source)
    whole = source["matrix"]
    for offset, shape in [((0, 0), (5, 7)), ((1, 2), (3, 4)), ((4, 6), (1, 1)), ((2, 3), (0, 2))]:
        box = Box(offset, shape)
        assert bits_of(checkpoint.read("matrix", box)) == bits_of(whole[box.slices])
        assert checkpoint.read_array("matrix", box).tobytes() == bits_of(whole[box.slices])[2]


def test_reading_outside_a_tensor_or_by_a_wrong_name_is_refused(tmp_path: Path) -> None:
    remesh.save({"layer": {"weight": torch.ones(2, 3)}}, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    for box in (Box((0, 1), (2, 3)), Box((0,), (2,)), Box((0, 0, 0), (1, 1, 1))):
        told = r"(?s)layer\.weight: box .* shape \(2, 3\)"
        with pytest.raises(remesh.errors.StateError, match=told):
            checkpoint.read("layer.weight", box)
    told = r"(?s)layer\.wieght: .* near are layer\.weight"
    with pytest.raises(remesh.errors.StateError, match=told):
        checkpoint.read("layer.wieght")
    with pytest.raises(KeyError, match=told):
        checkpoint["layer.wieght"]


def test_memory_of_any_strides_is_saved(tmp_path: Path) -> None:
    whole = torch.arange(60.0).reshape(5, 4, 3)
    source = {
        "transposed": whole.transpose(0, 2),
        "sliced": whole[1:4, ::2, 1],
        "expanded": torch.arange(3.0)[:, None].expand(3, 4),
        "channels_last": whole[None].contiguous(memory_format=torch.channels_last),
        "one_element_expanded": torch.tensor(7.0).expand(2, 2, 2),
        "numpy_transposed": whole.numpy().T,
        "numpy_reversed": whole.numpy()[::-1, :, ::2],
        "numpy_broadcast": np.broadcast_to(np.arange(4, dtype=np.int16), (3, 4)),
        "numpy_fortran": np.asfortranarray(whole.numpy()),
        "numpy_matrix": whole.numpy()[0].view(np.matrix),
    }
    remesh.save(source, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    for name, value in source.items():
        expected = value.numpy() if isinstance(value, torch.Tensor) else value
        np.testing.assert_array_equal(checkpoint.read_array(name), expected, name)


def test_memory_of_any_strides_is_filled_and_its_gaps_are_left_alone(tmp_path: Path) -> None:
    values = torch.arange(6.0).reshape(2, 3)
    names = ["columns", "transposed", "reversed", "matrix"]
    remesh.save({name: values + number for number, name in enumerate(names)}, tmp_path)
    holders = {name: torch.full((4, 6), -1.0) for name in names}
    array: Any = holders["reversed"].numpy()
    target: dict[str, Any] = {
        "columns": holders["columns"][1:3, ::2],
        "transposed": holders["transposed"].T[3:5, 1:4],
        "reversed": array[2:4, 1:4][::-1, ::-1],
        "matrix": holders["matrix"].numpy().view(np.matrix)[1:3, 2:5],
    }
    load_exactly(target, tmp_path)
    for number, name in enumerate(names):
        assert np.asarray(target[name]).tolist() == (values + number).tolist()
        assert (holders[name] == -1).sum() == 24 - 6


def test_parameters_are_filled_in_place_and_stay_parameters(tmp_path: Path) -> None:
    source = torch.nn.Parameter(torch.arange(4.0))
    remesh.save({"p": source, "computed": source * 2}, tmp_path)
    leaf = torch.nn.Parameter(torch.zeros(4))
    target = {"p": leaf, "computed": leaf + 0}
    load_exactly(target, tmp_path)
    assert target["p"] is leaf
    assert leaf.requires_grad
    assert leaf.grad_fn is None
    assert leaf.tolist() == [0, 1, 2, 3]
    assert target["computed"].tolist() == [0, 2, 4, 6]


def _holds_itself() -> list[Any]:
    result: list[Any] = []
    result.append(result)
    return result


REFUSED_ON_SAVE: dict[str, Callable[[], Any]] = {
    "meta tensor": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "objects": lambda: np.array([{}], dtype=object),
    "function": lambda: print,
    "module class": lambda: torch.nn.Linear,
    "itself": _holds_itself,
    "lambda deep inside": lambda: [{"a": (1, lambda: 0)}],
    "object beside a tensor": lambda: [object(), torch.ones(1)],
    "tensor of a tuple": lambda: {(1, 2): torch.ones(1)},
    "tensor of a truth": lambda: {True: torch.ones(1)},
    "texts": lambda: np.array(["text"]),
    "other byte order": lambda: np.zeros(2, ">i4"),
    "other byte order, complex": lambda: np.zeros(2, ">c16"),
    "records": lambda: np.zeros(2, np.dtype([("x", "f4")])),
    "long floats": lambda: np.zeros(2, np.longdouble),
    "sharded object": lambda: [remesh.sharding.ShardedObject("rng", object(), (1,), (0,))],
}


@pytest.mark.parametrize("kind", REFUSED_ON_SAVE)
def test_what_cannot_be_stored_is_refused_by_name_and_nothing_is_written(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(remesh.errors.UnsupportedValueError, match=r"^deep\.down"):
        remesh.save({"fine": 1, "deep": {"down": REFUSED_ON_SAVE[kind]()}}, tmp_path)
    assert list(tmp_path.iterdir()) == []


REFUSED_ON_LOAD: dict[str, Callable[[], Any]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "expanded": lambda: torch.zeros(1).expand(3),
    "read-only": lambda: np.broadcast_to(np.zeros(1, dtype=np.float32), (3,)),
}


@pytest.mark.parametrize("kind", REFUSED_ON_LOAD)
def test_what_cannot_be_filled_is_refused_and_nothing_is_changed(kind: str, tmp_path: Path) -> None:
    remesh.save({"first": torch.ones(2), "odd": torch.ones(3)}, tmp_path)
    target = {"first": torch.zeros(2), "odd": REFUSED_ON_LOAD[kind]()}
    with pytest.raises(remesh.errors.UnsupportedValueError, match=r"^odd: "):
        remesh.load(target, tmp_path)
    assert target["first"].tolist() == [0, 0]


def test_a_module_on_the_meta_device_is_refused_with_the_remedy(tmp_path: Path) -> None:
    remesh.save({"model": torch.nn.Linear(2, 2)}, tmp_path)
    with torch.device("meta"):
        module = torch.nn.Linear(2, 2)
    remedy = r"(?s)model\.weight: .*to_empty.*buffers with persistent=False again"
    with pytest.raises(remesh.errors.StateError, match=remedy):
        remesh.load({"model": module}, tmp_path)
    module.to_empty(device="cpu")
    load_exactly({"model": module}, tmp_path)
    assert module.weight.isfinite().all()


# ---------------------------------------------------------------------------------------------
# Values and containers
# ---------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    mean: Any
    variance: Any


def test_every_kind_of_plain_value(tmp_path: Path) -> None:
    # A dict with text for keys would be entries of the state.
    values = {
        str(number): [value] if isinstance(value, dict) else value
        for number, value in enumerate([*PLAIN, *NUMPY_SCALARS, *TORCH_CONSTANTS])
    }
    remesh.save(values, tmp_path)
    target: dict[str, object] = dict.fromkeys(values, "not loaded")
    load_exactly(target, tmp_path)
    checkpoint = remesh.Checkpoint(tmp_path)
    for found in (target, checkpoint.values, checkpoint.state()):
        assert found.keys() == values.keys()
        assert all(same(found[name], value) for name, value in values.items())


def nested(fill: float) -> dict[str, Any]:
    """A state of every container, in which each tensor and value is `fill` and a bit."""

    def tensor(more: int) -> torch.Tensor:
        return torch.full((2,), fill + more)

    return {
        "list": [tensor(1), {"inner": tensor(2), "value": fill + 3}, fill + 4],
        "tuple": (tensor(5), fill + 6),
        "named": Moments(tensor(7), fill + 8),
        "ordered": OrderedDict(b=tensor(9), a=fill + 10),
        "default": defaultdict(list, {"x": tensor(11), "y": fill + 12}),
        "counter": Counter({"seen": int(fill) + 13}),
        "frozen": types.MappingProxyType({"v": tensor(14), "w": fill + 15}),
        "numbered": {0: tensor(16), 7: {3: fill + 17}},
        "plain list": [fill + 18, [fill + 19]],
        "deep": {"er": {"est": ((tensor(20), [tensor(21)]),)}},
    }


def flat(node: Any) -> dict[str, Any]:
    """Leaves of a nested state by place, tensors and arrays as lists."""
    if isinstance(node, torch.Tensor | np.ndarray):
        return {"": node.tolist()}
    if isinstance(node, Mapping):
        items = list(node.items())
    elif isinstance(node, list | tuple):
        items = list(enumerate(node))
    else:
        return {"": node}
    return {f"/{key!r}{rest}": leaf for key, child in items for rest, leaf in flat(child).items()}


def test_containers_are_loaded_in_place_and_keep_their_types(tmp_path: Path) -> None:
    remesh.save(nested(100.0), tmp_path)
    target = nested(0.0)
    before = dict(target)
    first = target["list"][0]
    assert load_exactly(target, tmp_path) is target
    assert flat(target) == flat(nested(100.0))
    for name in ("list", "ordered", "default", "counter", "numbered", "deep"):
        assert target[name] is before[name]
    assert target["list"][0] is first
    for name, value in before.items():
        assert type(target[name]) is type(value), name
    assert target["default"].default_factory is list
    assert list(target["ordered"]) == ["b", "a"]
    # What cannot be changed is replaced; the old one keeps its values.
    assert before["tuple"][1] == 6.0
    assert before["named"].variance == 8.0
    assert before["frozen"]["w"] == 15.0
    assert target["tuple"][0] is before["tuple"][0]

    # Without a target.
    state = remesh.Checkpoint(tmp_path).state()
    assert flat(state) == flat(nested(100.0))
    assert (type(state["list"]), type(state["tuple"])) == (list, tuple)
    assert type(state["deep"]["er"]["est"]) is tuple
    assert type(state["deep"]["er"]["est"][0][1]) is list


def test_names_with_dots_and_numbers_keep_their_places(tmp_path: Path) -> None:
    source = {"a.b": torch.ones(1), "a": {"c.d": 2, "e": {"f.g": torch.zeros(2)}, 4: 5}, "": 6}
    remesh.save(source, tmp_path)
    assert set(remesh.Checkpoint(tmp_path).index) == {"a.b", "a.e.f.g"}
    assert flat(remesh.Checkpoint(tmp_path).state()) == flat(source)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.ones(2), "bare tensor"),
        (3, "bare int"),
        ("path/first", "bare str"),
        (None, "bare NoneType"),
    ],
)
def test_a_state_must_have_names(state: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(remesh.errors.StateError, match=message):
        remesh.save(state, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_state(tmp_path: Path) -> None:
    remesh.save({}, tmp_path)
    assert load_exactly({}, tmp_path) == {}
    checkpoint = remesh.Checkpoint(tmp_path)
    assert (len(checkpoint), checkpoint.values, checkpoint.state()) == (0, {}, {})
    assert checkpoint.verify().ok


def test_metadata_is_kept_beside_the_state(tmp_path: Path) -> None:
    metadata = {"step": 7, "note": "first ☃", "eval": {"loss": [0.5, None, True]}}
    remesh.save({"metadata": "a value of the state"}, tmp_path, metadata=metadata)
    checkpoint = remesh.Checkpoint(tmp_path)
    assert dict(checkpoint.metadata) == metadata
    assert checkpoint.values == {"metadata": "a value of the state"}


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["a"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    "metadata",
    [
        {"a": object()}, {1: "int key"}, {"t": (1,)}, {"nan": math.nan}, {"a": "\ud800"}, "a text",
        HOLDS_ITSELF,
    ],
)  # fmt: skip
def test_metadata_that_is_not_json_is_refused(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(remesh.errors.StateError, match="metadata must be a JSON object"):
        remesh.save({}, tmp_path, metadata=metadata)
    assert list(tmp_path.iterdir()) == []
