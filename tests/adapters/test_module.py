from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from remesh.adapters import describe_leaf
from remesh.core.state import Role, describe
from remesh.errors import NameCollisionError, StateError, UnsupportedValueError
from tests.adapters.fake_checkpoint import FakeCheckpoint, capture, restore


class Block(nn.Module):
    """Two linear layers and a buffer of each kind."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("running", torch.randn(2))
        self.register_buffer("scratch", torch.randn(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.inner(x))
        return result


NAMES = {
    "inner.weight",
    "inner.bias",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.num_batches_tracked",
    "running",
}


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def names_of(state: Any) -> set[str]:
    return {entry.name for entry in describe(state, describe_leaf).tensors}


def equal(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_stores_the_entries_of_the_state_dict() -> None:
    description = describe({"model": model()}, describe_leaf)
    assert names_of({"model": model()}) == {f"model.{i}.{name}" for i in (0, 1) for name in NAMES}
    assert {entry.role for entry in description.tensors} == {Role.ASSUMED}
    assert description.paths["model.0.inner.weight"] == ("model", "0.inner.weight")


def test_a_bare_module_and_its_state_dict_have_the_same_names() -> None:
    module = model()
    assert names_of(module) == names_of(dict(module.state_dict())) == set(module.state_dict())


def test_loads_in_place_into_another_module() -> None:
    source, target = model(), model()
    assert not equal(source, target)
    before = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    result = restore({"model": target}, FakeCheckpoint([capture({"model": source})]))
    assert result.state["model"] is target
    assert result.missing == result.unexpected == set()
    assert equal(source, target)
    assert {name: t.data_ptr() for name, t in target.state_dict().items()} == before
    assert all(p.requires_grad and p.grad is None for p in target.parameters())


def test_what_the_checkpoint_lacks_stays_and_is_missing() -> None:
    source = nn.Sequential(nn.Linear(2, 2))
    target = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = copy.deepcopy(target[1])
    result = restore(target, FakeCheckpoint([capture(source)]))
    assert result.missing == {"1.weight", "1.bias"}
    assert equal(target[1], kept)
    assert equal(target[0], source[0])


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module)  # type: ignore[return-value]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize(
    "wrap",
    [
        compiled,
        checkpoint_wrapper,
        lambda m: compiled(checkpoint_wrapper(m)),
        lambda m: checkpoint_wrapper(compiled(m)),
        lambda m: nn.Sequential(checkpoint_wrapper(m[0]), compiled(m[1])),
        lambda m: checkpoint_wrapper(
            nn.Sequential(checkpoint_wrapper(compiled(m[0])), compiled(checkpoint_wrapper(m[1])))
        ),
    ],
)
def test_wrappers_do_not_show(wrap: Any) -> None:
    source, plain = model(), model()
    wrapped = wrap(copy.deepcopy(source))
    assert names_of(wrapped) == names_of(plain)
    restore(plain, FakeCheckpoint([capture(wrapped)]))
    assert equal(plain, source)
    other = model()
    assert restore(wrapped, FakeCheckpoint([capture(other)])).missing == set()
    assert equal(wrapped, other)


def test_an_attribute_called_like_a_wrapper_is_no_wrapper() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)
            self._orig_mod = nn.Linear(2, 2)

    assert names_of(Holder()) == {
        "module.weight",
        "module.bias",
        "_orig_mod.weight",
        "_orig_mod.bias",
    }


def test_tied_weights_have_one_alias_key() -> None:
    source = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    source["head"].weight = source["embed"].weight
    entries = {e.name: e for e in describe(source, describe_leaf).tensors}
    assert entries["embed.weight"].alias_key == entries["head.weight"].alias_key is not None
    target = copy.deepcopy(source)
    nn.init.zeros_(target["head"].weight)  # type: ignore[arg-type]
    restore(target, FakeCheckpoint([capture(source)]))
    assert target["head"].weight is target["embed"].weight
    assert equal(source, target)


class Remembering(nn.Module):
    """Has extra state of any form."""

    def __init__(self, memory: object) -> None:
        super().__init__()
        self.memory = memory
        self.weight = nn.Parameter(torch.randn(2))

    def get_extra_state(self) -> object:
        return self.memory

    def set_extra_state(self, state: object) -> None:
        self.memory = state


@pytest.mark.parametrize("live", [None, {}, {"seen": [], "amax": torch.zeros(1)}, torch.zeros(9)])
@pytest.mark.parametrize(
    "memory",
    [
        {"seen": [1, 2], "amax": torch.arange(3.0), "per_layer": [torch.ones(1), 5]},
        torch.arange(4, dtype=torch.uint8),
        "text",
        {},
        None,
    ],
)
def test_extra_state_of_any_structure(memory: Any, live: object) -> None:
    source = nn.Sequential(Remembering(memory))
    target = nn.Sequential(Remembering(live))
    result = restore({"m": target}, FakeCheckpoint([capture({"m": source})]))
    assert result.missing == result.unexpected == set()
    found: Any = target[0].memory
    assert str(found) == str(memory)
    assert type(found) is type(memory)
    assert equal_weights(target, source)


def equal_weights(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_state_dict_hooks_are_honoured() -> None:
    class Transposed(nn.Linear):
        """Stores its weight transposed under another name."""

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            destination[f"{prefix}kernel"] = self.weight.detach().t().contiguous()

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *_args: Any) -> None:
            with torch.no_grad():
                self.weight.copy_(state_dict[f"{prefix}kernel"].t())

    source, target = (nn.Sequential(Transposed(2, 3, bias=False)) for _ in range(2))
    assert names_of(source) == {"0.kernel"}
    restore(target, FakeCheckpoint([capture(source)]))
    assert torch.equal(source[0].weight, target[0].weight)  # type: ignore[arg-type]


def test_refuses_what_it_cannot_store_by_name() -> None:
    with pytest.raises(UnsupportedValueError, match=r"(?s)model.weight: .*forward pass"):
        describe({"model": nn.LazyLinear(2)}, describe_leaf)
    sparse = nn.Module()
    sparse.register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedValueError, match=r"(?s)model.adjacency: .*to_dense"):
        describe({"model": sparse}, describe_leaf)


def test_a_meta_module_can_be_described_but_not_filled() -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    assert {e.name: e.global_shape for e in describe(module, describe_leaf).tensors} == {
        "weight": (2, 2),
        "bias": (2,),
    }
    with pytest.raises(UnsupportedValueError, match=r"(?s)weight: .*to_empty"):
        restore(module, FakeCheckpoint([capture(nn.Linear(2, 2))]))


def test_refuses_names_that_differ_by_wrappers_only() -> None:
    class Shadow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = checkpoint_wrapper(nn.Linear(2, 2))

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            plain: dict[str, Any] = super().state_dict(*args, **kwargs)
            return {**plain, "block._checkpoint_wrapped_module.weight": torch.zeros(2)}

    with pytest.raises(NameCollisionError, match=r"block.weight"):
        describe({"model": Shadow()}, describe_leaf)
    assert issubclass(NameCollisionError, StateError)
