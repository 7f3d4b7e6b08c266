"""`ShardOptim` and `init_empty_weights_with_disk_offload`: each rank reads the elements it has now.

The directory is a checkpoint of the engine (`remesh.formats.flat_param`). What is read is what the
engine's description of the model says that this rank holds, so the number of ranks, the wrapping
and FSDP1 or FSDP2 may all have changed.

A model that is built inside of `init_empty_weights_with_disk_offload` has no memory. The call that
gives it some (FSDP1 when it wraps a module, a trainer after FSDP2's `fully_shard`) afterwards calls
`reset_parameters` of every module that has parameters or buffers. That is where they are read: on
leaving the context each module gets a `reset_parameters` of its own, which reads what the module
has at that moment, and goes away.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from remesh.adapters.wrappers import entry_names
from remesh.checkpoint import Checkpoint, load
from remesh.checkpoint.local import describe_local
from remesh.compat.atorch.saving import GROUPS, STATE, groups_of
from remesh.core.sharded import LocalNonpersistentObject
from remesh.errors import MismatchError
from remesh.exchange import Alone


class ShardOptim:
    """The state of an optimizer that `save_fsdp_optim_param` or ATorch saved."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._checkpoint = Checkpoint(path)

    def reshard_optim_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """The state that an optimizer over a model needs on this rank. Not collective.

        The model is wrapped as it is going to be trained: in FSDP1 with `use_orig_params=True`, in
        FSDP2, or not at all. The result is for `load_state_dict` of an optimizer whose groups have
        the parameters that they had when they were saved, in the order of `model.parameters()`.
        """
        options = {**self._checkpoint.values, **self._checkpoint.lists}
        groups = groups_of({name: options[name] for name in options if name.startswith(GROUPS)})
        parameters = dict(model.named_parameters())
        names = entry_names(model, parameters)
        by_name = {names[raw].name: parameter for raw, parameter in parameters.items()}
        saved = {name for group in groups for name in group["params"]}
        missing = sorted(saved - by_name.keys())
        if missing:
            raise MismatchError(
                f"the model has no parameters {', '.join(missing[:10])}, for which optimizer state "
                "is stored\nFSDP1 needs use_orig_params=True",
                missing=tuple(missing),
            )
        for group in groups:
            own = set(group["params"])
            group["params"] = [one for name, one in by_name.items() if name in own]
        # Of no class: the engine fills it with what is stored, and it is never stepped.
        optimizer = torch.optim.Optimizer(groups, {})
        state = {"model": LocalNonpersistentObject(model), "optimizer": optimizer}
        load(state, self._path, transform=self._shapes(model, by_name), group=Alone())
        return optimizer.state_dict()

    def _shapes(self, model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Statements that give flattened state the shapes of its parameters.

        State of parameters of which this rank has nothing is left out.
        """
        shapes = {entry.name: entry.global_shape for entry in describe_local(model).tensors}
        statements = []
        for full in self._checkpoint.index:
            name = full.removeprefix(STATE).rpartition(".")[0]
            wanted, stored = shapes.get(name), self._checkpoint.tensor(full).shape
            if full.startswith(STATE) and name in parameters and not parameters[name].numel():
                statements.append(f'"{full}" -> _')
                continue
            if not full.startswith(STATE) or wanted is None or stored in {(), wanted}:
                continue
            if stored != (math.prod(wanted),):
                raise MismatchError(
                    f"{full}: stored with shape {stored}, but the parameter has {wanted}",
                    conflicts=(full,),
                )
            statements.append(f'"{full}" -> "{full}", reshape={list(wanted)}')
        return statements


_BUILT: ContextVar[dict[int, nn.Module] | None] = ContextVar("modules built here", default=None)
"""By their ids, the modules that were given something in the innermost context of this thread."""


def _note(module: nn.Module, _name: str, _given: Any) -> None:
    built = _BUILT.get()
    if built is not None:
        built[id(module)] = module


# Once and for ever: while any thread builds a module, torch walks over all these hooks, and that
# fails if one comes or goes.
register_module_parameter_registration_hook(_note)
register_module_buffer_registration_hook(_note)
register_module_module_registration_hook(_note)


@contextmanager
def init_empty_weights_with_disk_offload(ckpt_path: str | os.PathLike[str]) -> Iterator[None]:
    """Build a model without memory; its parameters are read when it gets some. Not collective.

    Inside the context, modules are built on the meta device. FSDP1 gives a module memory when it
    wraps it, unit by unit, and lets it read then. For anything else: shard the model, call its
    `to_empty(device=...)`, then `reset_parameters()` of each of its `modules()` that has tensors of
    its own. Each rank reads the part that it has at that moment.
    """
    checkpoint = Checkpoint(ckpt_path)
    built: dict[int, nn.Module] = {}
    token = _BUILT.set(built)
    try:
        with torch.device("meta"):
            yield
    finally:
        _BUILT.reset(token)
    inner = {id(child) for module in built.values() for child in module.children()}
    for root in (module for key, module in built.items() if key not in inner):
        for prefix, module in root.named_modules():
            if any(True for _ in _own_tensors(module)):
                fill = functools.partial(_fill, checkpoint, f"{prefix}." if prefix else "", module)
                vars(module)["reset_parameters"] = fill


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return itertools.chain(
        module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    )


def _fill(checkpoint: Checkpoint, prefix: str, module: nn.Module) -> None:
    """Read what a module has of its tensors; takes the place of its `reset_parameters`."""
    tensors = {f"model.{prefix}{name}": tensor for name, tensor in _own_tensors(module)}
    for entry in describe_local(tensors).tensors:
        if entry.name not in checkpoint.index:
            raise MismatchError(f"{entry.name}: not stored in {checkpoint}", (entry.name,))
        stored = checkpoint.tensor(entry.name)
        if (stored.shape, stored.dtype) != (entry.global_shape, entry.dtype):
            raise MismatchError(
                f"{entry.name}: stored as {stored.dtype} {stored.shape}, but the module has "
                f"{entry.dtype} {entry.global_shape}",
                conflicts=(entry.name,),
            )
        for part in entry.parts:
            assert isinstance(part.data, torch.Tensor)
            with torch.no_grad():
                part.data.copy_(checkpoint.read(entry.name, part.box))
    vars(module).pop("reset_parameters", None)
