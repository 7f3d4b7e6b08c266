"""Fingerprints: what they notice of every kind of tensor, and that they hold none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from remesh.core.sharded import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from remesh.sharding import DescribedOptimizer, NamedModule
from remesh.training.fingerprints import Fingerprints

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.complex64,
    torch.complex128,
)


def flip(tensor: torch.Tensor) -> None:
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    memory.bitwise_not_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (17,), (31,), (33,), (257,), (60, 70)])
def test_a_write_past_the_version_is_noticed(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    prints, state = Fingerprints(), {"other": torch.ones(9), "own": tensor}
    then = prints.take(state)
    version = tensor._version
    assert then.changed(state) == ""
    assert prints.take(state).digest() == then.digest()
    flip(tensor)
    assert tensor._version == version
    assert then.changed(state) == "state.own"
    assert prints.take(state).digest() != then.digest()
    assert then.changed(state, [id(tensor)]) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("size", [1, 7, 63, 256])
def test_each_element_of_a_small_tensor_counts(dtype: torch.dtype, size: int) -> None:
    # From an odd address on, where there is one.
    tensor = torch.zeros(size + 1, dtype=dtype)[1:]
    count = min(size, 256 // tensor.itemsize)
    tensor = tensor[:count]
    then = Fingerprints().take([tensor])
    for place in range(count):
        tensor.data[place] = 1
        assert then.changed([tensor]) == "state.0"
        tensor.data[place] = 0
    assert then.changed([tensor]) == ""


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.t(),
        lambda base: base[:, ::2],
        lambda base: base[3:, 5:],
        lambda base: base[:1].expand(90, 100),
        lambda base: base[:1, :1].expand(90, 100),
        lambda base: base.view(2, 5, 10, 100).to(memory_format=torch.channels_last),
    ],
)
def test_views_are_sampled_within_their_memory(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = view(torch.zeros(100, 100))
    then = Fingerprints().take([tensor])
    assert then.changed([tensor]) == ""
    tensor.data.copy_(torch.ones(())) if 0 not in tensor.stride() else tensor[0].data.fill_(1)
    assert then.changed([tensor]) == "state.0"


def test_memory_that_is_not_there_is_not_read() -> None:
    base = torch.zeros(10_000)
    freed = base[100:]
    base.untyped_storage().resize_(0)
    sparse, meta = torch.eye(3).to_sparse(), torch.ones(3, device="meta")
    with torch.inference_mode():
        unversioned = torch.ones(3)
    state = [freed, sparse, meta, unversioned, torch.ones(0)]
    then = Fingerprints().take(state)
    assert then.changed(state) == ""
    flip(unversioned)
    assert then.changed(state) == "state.3"


def test_the_parts_of_subclasses_are_looked_at() -> None:
    first, second = torch.ones(3), torch.ones(3)
    both: Any = TwoTensor(first, second)  # type: ignore[no-untyped-call]
    then = Fingerprints().take([both])
    assert then.changed([both]) == ""
    second.data.add_(1)
    assert then.changed([both]) == "state.0"


def test_no_memory_is_held() -> None:
    parameter = torch.nn.Parameter(torch.ones(100, 100))
    model, optimizer = torch.nn.Module(), torch.optim.AdamW([parameter])
    model.weight = parameter
    torch.autograd.backward(parameter.sum())
    optimizer.step()
    prints = Fingerprints()
    then = prints.take({"model": model, "optimizer": optimizer})
    moments = optimizer.state[parameter]
    seen = [weakref.ref(moments["exp_avg"].untyped_storage()), weakref.ref(moments["exp_avg"])]
    moments.clear()
    gc.collect()
    assert [one() for one in seen] == [None, None]
    assert "added or removed" in then.changed({"model": model, "optimizer": optimizer})


def test_all_of_the_state_of_an_optimizer_is_looked_at() -> None:
    optimizer: Any = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    lists, plain = [torch.ones(3)], torch.ones(3)
    optimizer.state["own"] = {"lists": lists, "number": 1}
    optimizer.state["plain"] = plain
    prints = Fingerprints()
    then = prints.take(optimizer)
    plain.data.add_(1)
    assert then.changed(optimizer) == "state.state.1"
    then = prints.take(optimizer)
    lists[0].data.add_(1)
    assert then.changed(optimizer) == "state.state.0.lists.0"


def test_what_a_description_is_of_is_looked_at() -> None:
    module, master, data = torch.nn.Linear(2, 2), torch.ones(6), torch.ones(3)
    state = {
        "named": NamedModule(module, {"": "net"}),
        "described": DescribedOptimizer(torch.optim.SGD([master]), {master: ()}),
        "factory": ShardedTensorFactory("made", data, lambda _, own: own, lambda own: own),
        "left out": LocalNonpersistentObject(torch.nn.Linear(2, 2)),
    }
    for tensor, name in ((module.bias, "named.bias"), (master, "described.1"), (data, "factory")):
        then = Fingerprints().take(state)
        tensor.data.add_(1)
        assert then.changed(state) == f"state.{name}"
    assert len(then.versions) == 4


def test_tensors_without_memory_of_their_own_may_be_in_modules() -> None:
    graph = torch.nn.Module()
    graph.register_buffer("edges", torch.eye(3).to_sparse(), persistent=False)
    state = [graph, torch.nn.LazyLinear(3)]
    assert Fingerprints().take(state).changed(state) == ""


def test_shards_of_a_state_are_found() -> None:
    data = torch.ones(4)
    state: Any = [ShardedTensor.at_offset("rows", data, (8,), (4,))]
    then = Fingerprints().take(state)
    data.data.add_(1)
    assert then.changed(state) == "state.0"


def test_a_tensor_that_has_another_size_has_changed() -> None:
    state = {"kept": torch.zeros(100), "queue": torch.zeros(10)}
    then = Fingerprints().take(state)
    state["queue"] = torch.zeros(12)
    assert then.changed(state) == "state.queue"


def test_a_tensor_in_the_place_of_one_with_gaps_is_read_where_it_is() -> None:
    memory = torch.zeros(4000)
    prints = Fingerprints()
    prints.take([memory[::2]])
    smaller = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=2000)
    assert smaller.data_ptr() == memory.data_ptr()
    assert smaller.untyped_storage().nbytes() == 8000
    then = prints.take([smaller])
    assert then.changed([smaller]) == ""
    smaller.data.fill_(1)
    assert then.changed([smaller]) == "state.0"


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantized_tensor_is_known_by_its_place_alone() -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(1000), 0.1, 0, torch.qint8)
    plain = torch.zeros(3)
    then = Fingerprints().take([quantized, plain])
    assert then.changed([quantized, plain]) == ""
    plain.data.add_(1)
    assert then.changed([quantized, plain]) == "state.1"
