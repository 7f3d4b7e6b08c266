from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from remesh.adapters import describe_leaf
from remesh.core.state import describe
from remesh.errors import NameCollisionError, StateError, UnsupportedValueError
from tests.adapters.stored import transfer


def names_of(state: Any) -> set[str]:
    return {entry.name for entry in describe(state, describe_leaf).tensors}


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
    transfer(source, target)
    assert torch.equal(source[0].weight, target[0].weight)  # type: ignore[arg-type]


class Hooked(nn.Linear):
    """Stores what a hook makes of the weight, under a name that the module does not have."""

    def __init__(self, name: str, make: Any, *, takes: bool = False) -> None:
        super().__init__(3, 3, bias=False)
        self.name, self.make, self.takes = name, make, takes
        self.register_state_dict_post_hook(type(self).add)  # type: ignore[no-untyped-call]

    @staticmethod
    def add(module: Any, state_dict: Any, prefix: str, _meta: Any) -> None:
        state_dict[prefix + module.name] = module.make(module.weight.detach())
        if module.name != "product":
            del state_dict[prefix + "weight"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.takes:
            state_dict[prefix + "weight"] = state_dict[prefix + self.name].float()
        super()._load_from_state_dict(state_dict, prefix, *args)


HOOKS: dict[str, Any] = {
    "renamed": ("kernel", lambda weight: weight.t()),
    "half with a load hook": ("half", torch.Tensor.half, True),
    "what follows from others": ("product", lambda weight: weight @ weight * (1 + 1e-6 * weight)),
    "half": ("half", torch.Tensor.half),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_what_a_hook_makes_is_loaded_or_refused(kind: str) -> None:
    name, make, *takes = HOOKS[kind]
    source, target = (nn.Sequential(Hooked(name, make, takes=bool(takes))) for _ in range(2))
    if kind != "half":
        transfer({"m": source}, {"m": target})
        torch.testing.assert_close(source[0].weight, target[0].weight, atol=1e-3, rtol=1e-3)
        return
    with pytest.raises(StateError, match=r"(?s)^m\.0\.half: .*load_state_dict_pre_hook"):
        transfer({"m": source}, {"m": target})


def test_what_is_computed_again_must_come_out_as_it_was() -> None:
    source, target = (Hooked("product", lambda w, by=by: w @ w * by) for by in (1, 1.005))
    with pytest.raises(StateError, match=r"^m\.product: "):
        transfer({"m": source}, {"m": target})


def test_refuses_what_it_cannot_store_by_name() -> None:
    with pytest.raises(UnsupportedValueError, match=r"(?s)model.weight: .*forward pass"):
        describe({"model": nn.LazyLinear(2)}, describe_leaf)
    sparse = nn.Module()
    sparse.register_buffer("adjacency", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedValueError, match=r"(?s)model.adjacency: .*to_dense"):
        describe({"model": sparse}, describe_leaf)


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
