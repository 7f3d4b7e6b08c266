from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from remesh.adapters import casting_memory_of, memory_of
from remesh.adapters.memory import DeviceMemory, alias_key, check_strided
from remesh.core.dtypes import BY_NAME, DTYPES
from remesh.core.geometry import Box
from remesh.core.memory import HostMemory, Memory
from remesh.core.sharded import ArrayLike
from remesh.errors import UnsupportedValueError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TORCH_DTYPES = [dtype.name for dtype in DTYPES if hasattr(torch, dtype.name)]


def random_tensor(name: str, *shape: int) -> torch.Tensor:
    """Random bytes seen as elements; every pattern of a bool is kept valid."""
    dtype = getattr(torch, name)
    raw = torch.randint(0, 256, (*shape, BY_NAME[name].itemsize), dtype=torch.uint8)
    return (raw % 2 if name == "bool" else raw).view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements in one more dim; torch copies those of every dtype."""
    return tensor.view(torch.uint8).reshape(*tensor.shape, tensor.itemsize)


def all_of(memory: Memory, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype]:
    values = np.empty(shape, memory.carrier)
    memory.copy_out(Box.whole(shape), values)
    return values


def as_device(array: ArrayLike, where: str) -> Memory:
    """The memory that the tensor would have on a device; the CPU stands in for one."""
    memory = memory_of(array, where)
    assert isinstance(memory, HostMemory)
    assert isinstance(array, torch.Tensor)
    movable = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return DeviceMemory(
        array.detach().view(movable.get(array.itemsize, torch.complex128)), memory.carrier
    )


@pytest.mark.parametrize("make", [memory_of, as_device])
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_copies_the_bytes_of_every_dtype(name: str, make: type[Memory]) -> None:
    source, target = random_tensor(name, 6, 5), random_tensor(name, 6, 5)
    before = raw_bytes(target).clone()
    box = Box((1, 2), (4, 3))
    values = np.empty(box.shape, BY_NAME[name].carrier)
    memory_in, memory_out = make(target, "t"), make(source, "s")  # type: ignore[call-arg]
    memory_out.copy_out(box, values)
    memory_in.copy_in(box, values)
    assert memory_out.carrier == BY_NAME[name].carrier
    assert values.tobytes() == raw_bytes(source)[box.slices].numpy().tobytes()
    before[box.slices] = raw_bytes(source)[box.slices]
    assert torch.equal(raw_bytes(target), before)


@pytest.mark.parametrize("make", [memory_of, as_device])
def test_keeps_strides(make: type[Memory]) -> None:
    base = torch.arange(48.0).reshape(6, 8).to(torch.bfloat16)
    view = base[::2, 1:].t()
    memory = make(view, "t")  # type: ignore[call-arg]
    assert np.array_equal(all_of(memory, (7, 3)), view.contiguous().view(torch.uint16).numpy())
    memory.copy_in(Box((6, 0), (1, 3)), np.zeros((1, 3), "<u2"))
    assert base[::2, 7].tolist() == [0, 0, 0]
    assert base[1::2, 7].tolist() == [15, 31, 47]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
@pytest.mark.parametrize("make", [memory_of, as_device])
def test_scalars_and_empty_tensors(shape: tuple[int, ...], make: type[Memory]) -> None:
    tensor = torch.full(shape, 7, dtype=torch.bfloat16)
    memory = make(tensor, "t")  # type: ignore[call-arg]
    assert all_of(memory, shape).shape == shape
    memory.copy_in(Box.whole(shape), np.zeros(shape, "<u2"))
    assert not tensor.any()


PLAIN = np.arange(3, dtype="<f4")
FIELDS = np.zeros(3, [("byte", "u1"), ("value", "<f4")])
ODD = {
    "read-only": np.frombuffer(PLAIN.tobytes(), "<f4"),
    "backwards": PLAIN[::-1].copy()[::-1],
    "in records": FIELDS["value"],
}
"""Arrays that torch does not take."""
FIELDS["value"] = PLAIN


@pytest.mark.parametrize("kind", ODD)
def test_device_memory_and_odd_arrays(kind: str) -> None:
    tensor, whole = torch.zeros(3), Box.whole((3,))
    as_device(tensor, "t").copy_in(whole, ODD[kind])
    assert tensor.tolist() == [0, 1, 2]
    if kind != "read-only":
        as_device(tensor + 5, "t").copy_out(whole, ODD[kind])
        assert ODD[kind].tolist() == [5, 6, 7]
        ODD[kind][...] = PLAIN
        with pytest.raises(UnsupportedValueError, match="these strides"):
            casting_memory_of(ODD[kind], "int8", "t")


def test_tensors_of_inference_are_filled_in_any_thread() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(3, dtype=torch.bfloat16)
    casting_memory_of(tensor, "float32", "t").copy_in(Box.whole((3,)), PLAIN)
    assert tensor.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (torch.empty(2, device="meta"), "to_empty"),
        (torch.eye(2).to_sparse(), "to_dense"),
        (torch.eye(2).to_mkldnn(), "to_dense"),
        (torch.ones(2, dtype=torch.complex64).conj(), "resolve_conj"),
        (torch.ones(2, dtype=torch.complex64).conj().imag, "resolve_neg"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "other tensors"),
        (nn.LazyLinear(2).weight, "forward pass"),
        (np.zeros(2, ">f4"), "foreign byte order|astype"),
        (np.zeros(2, "S4"), "astype"),
    ],
)
def test_refuses_what_has_no_memory(array: ArrayLike, message: str) -> None:
    with pytest.raises(UnsupportedValueError, match=rf"(?s)model.weight: .*({message})"):
        memory_of(array, "model.weight")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_refuses_quantised_tensors() -> None:
    tensor = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
    with pytest.raises(UnsupportedValueError, match="int_repr"):
        check_strided(tensor, "w")


def test_refuses_to_write_where_elements_share_memory() -> None:
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    for array in (torch.zeros(1).expand(3), np.broadcast_to(np.zeros(1), 3), read_only):
        memory_of(array, "t")
        with pytest.raises(UnsupportedValueError, match=r"(?s)t: .*(share memory|read-only)"):
            memory_of(array, "t", writable=True)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64", "int32", "bool"])
def test_casting_memory_converts(stored: str) -> None:
    wanted = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    values = wanted.to(getattr(torch, stored))
    carried = all_of(memory_of(values, "v"), (2, 2))
    for target in (torch.full((2, 3), 9, dtype=torch.bfloat16), np.full((2, 3), 9.0)):
        memory = casting_memory_of(target, stored, "t")
        assert memory.carrier == BY_NAME[stored].carrier
        memory.copy_in(Box((0, 1), (2, 2)), carried)
        assert target.tolist() == [[9, 0, 1], [9, 1, 0]]
        back = np.empty((2, 2), memory.carrier)
        memory.copy_out(Box((0, 1), (2, 2)), back)
        assert back.tobytes() == carried.tobytes()


def test_alias_keys_tell_same_memory() -> None:
    tensor = torch.zeros(4, 4)
    assert alias_key(tensor) == alias_key(tensor.detach()) == alias_key(tensor.view(4, 4))
    others = [tensor[1:], tensor.t(), tensor.view(torch.int32), tensor.clone(), tensor.view(16)]
    assert len({alias_key(other) for other in [tensor, *others]}) == 6
    assert alias_key(torch.zeros(0)) is None
    assert alias_key(torch.empty(3, device="meta")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_copies_to_and_from_a_real_device(name: str) -> None:
    source = random_tensor(name, 6, 5)
    target = torch.empty_like(source, device="cuda")  # no kernel fills all of these
    box = Box((1, 2), (4, 3))
    values = np.empty(box.shape, BY_NAME[name].carrier)
    memory_of(source, "s").copy_out(box, values)
    memory = memory_of(target, "t", writable=True)
    assert isinstance(memory, DeviceMemory)
    memory.copy_in(box, values)
    back = np.empty_like(values)
    memory.copy_out(box, back)
    assert back.tobytes() == values.tobytes()
    assert memory.carrier == values.dtype
