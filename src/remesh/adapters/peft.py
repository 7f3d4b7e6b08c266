"""Models of peft: adapters under the names of peft's files, and copies with adapters merged.

A file of peft has the tensors of one adapter, under names without the adapter's: `lora_A.weight`
there is `lora_A.default.weight` in the model. Which tensors these are, what they are called, and
how an adapter is merged differ between its methods, so peft itself is asked. It is not imported
here: where there is a model of peft, it has been.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from remesh.adapters.fsdp1 import has_fsdp1
from remesh.adapters.memory import alias_key
from remesh.adapters.wrappers import unwrapped
from remesh.errors import StateError


def peft_model(state: object) -> Any:
    """The `peft.PeftModel` that a state is, without its wrappers; None if it is something else."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    if kind is None or not isinstance(state, nn.Module):
        return None
    found = unwrapped(state)
    return found if isinstance(found, kind) else None


def adapter_target(state: Any, stored: Iterable[str], *, is_transformed: bool = False) -> Any:
    """What to fill with a checkpoint of these names: for files of peft, tensors of the adapters.

    They are called as in the files; an adapter that is not called `default` may lie in a folder of
    its name. Base weights are in no file of peft, and stay as they are. In a checkpoint of the
    Trainer the adapters are below `model`.

    Raises:
        StateError: If peft stores something else than tensors of the model, or has merged them, or
            if the model of a file of peft is an entry of the state, and no transform moves it.
    """
    names = set(stored)
    model = peft_model(state)
    if model is not None:
        found = _stored_adapters(state, model, names)
        if found is None and not is_transformed:
            inner = _stored_adapters(state, model, _below("model", names))
            found = None if inner is None else {"model": inner}
        return state if found is None else found
    for key, value in state.items() if isinstance(state, Mapping) and not is_transformed else ():
        model = peft_model(value)
        if model is None:
            continue
        if any(_stored_adapters(value, model, own) for own in (names, _below(key, names))):
            raise StateError(
                f"{key}: is a model of peft, and only its adapters are stored, as in its files\n"
                "Pass the model itself: remesh.load(model, folder). That leaves the optimizer out; "
                "the Trainer resumes with its optimizer.pt by resume_from_checkpoint"
            )
    return state


def _below(key: Any, names: Iterable[str]) -> set[str]:
    """Names without a first key, of those that begin with it."""
    return {name.removeprefix(f"{key}.") for name in names if name.startswith(f"{key}.")}


def _stored_adapters(state: nn.Module, model: Any, names: set[str]) -> dict[str, Any] | None:
    """The tensors of a model by their names in files of peft, if these are the names in such."""
    if has_fsdp1(state):
        return None
    model = _without_wrappers(model)
    own = model.state_dict(keep_vars=True)
    if own.keys() <= names:
        return None  # all of the model is stored
    target: dict[str, Any] = {}
    for adapter in model.peft_config:
        found = _tensors(model, adapter, own, has_embeddings=False)
        if hasattr(model, "get_input_embeddings"):
            with_embeddings = _tensors(model, adapter, own, has_embeddings=True)
            found |= {name: one for name, one in with_embeddings.items() if name in names}
        has_folder = any(name.startswith(f"{adapter}.") for name in names)
        if has_folder or (adapter != "default" and len(model.peft_config) > 1):
            found = {f"{adapter}.{name}": tensor for name, tensor in found.items()}
        target |= found
    if names.isdisjoint(target.keys() - own.keys()) or names & (own.keys() - target.keys()):
        return None  # some of the model is stored
    known = {id(tensor) for tensor in own.values()}
    computed = sorted(name for name, tensor in target.items() if id(tensor) not in known)
    if computed:
        raise StateError(
            f"{computed[0]}: is computed by peft of the model's tensors, and cannot be filled\n"
            "Load the folder by peft: model.load_adapter(folder, adapter_name)"
        )
    check_unmerged(model)
    return target


def check_unmerged(module: nn.Module) -> None:
    """Refuse a module of which peft has added adapters to base weights.

    Its state does not say so: loaded into another one, adapters would count twice or not at all.
    """
    layers = module.modules() if "peft" in sys.modules else ()
    if any(vars(layer).get("merged_adapters") for layer in layers):
        raise StateError(
            "the adapters are merged into the base weights\n"
            "Call model.unmerge_adapter() before the save or load"
        )


def _tensors(
    model: Any, adapter: str, own: Mapping[str, Any], *, has_embeddings: bool | Literal["auto"]
) -> dict[str, Any]:
    """The tensors of an adapter by their names in its file."""
    from peft import get_peft_model_state_dict

    found: dict[str, Any] = get_peft_model_state_dict(
        model, dict(own), adapter, save_embedding_layers=has_embeddings
    )
    return found


def check_not_flat(state: object) -> None:
    """Refuse models whose parameters peft does not see."""
    if isinstance(state, nn.Module) and has_fsdp1(state):
        raise StateError(
            "peft does not know adapters in flat parameters (FSDP1)\n"
            "Save the model by remesh.save, load that into a model of one process, and export this"
        )


def adapter_tensors(model: Any, adapter: str) -> dict[str, Tensor]:
    """What peft's `save_pretrained` stores of an adapter; each name has memory of its own."""
    model = _without_wrappers(model)
    found = _tensors(model, adapter, model.state_dict(), has_embeddings="auto")
    keys = set()
    for name, tensor in found.items():
        # peft's loads leave out what a file lacks, so names of one tensor are all written.
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if (key := alias_key(local)) in keys:
            found[name] = tensor.clone()
        keys.add(key)
    return found


def adapter_config(model: Any, adapter: str) -> dict[str, Any]:
    """The content of `adapter_config.json`, as peft's `save_pretrained` writes it."""
    config = copy.deepcopy(model.peft_config[adapter])
    base = _without_wrappers(model).get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = vars(base).get("name_or_path") or None
    kind = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    with TemporaryDirectory() as folder:
        config.save_pretrained(
            folder, auto_mapping_dict=mapping if config.task_type is None else None
        )
        [path] = Path(folder).iterdir()
        written: dict[str, Any] = json.loads(path.read_text())
    return written


def merged_copy(model: Any) -> Any:
    """The base model of a peft model with its active adapters merged by peft. Collective.

    It has memory of its own for layers with adapters, in the layout that they have, and shares that
    of all others with the model, which is not changed. Each rank has one such layer whole at once.

    Raises:
        StateError: If peft cannot merge them.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model.state_dict()  # FSDP2 reshards what a forward has gathered
    try:
        with torch.no_grad():
            made = _shallow_copy(model, {})
            for layer in list(made.modules()):
                if isinstance(layer, BaseTunerLayer):
                    _merge_layer(layer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there is nothing left to merge
                merged = made.merge_and_unload()
    except Exception as error:
        raise StateError(
            f"peft cannot merge the adapters of this model: {error}\n"
            "Export the adapters alone, merge=False, and merge them where the base model is whole "
            "and not quantised: PeftModel.from_pretrained(base, path).merge_and_unload()"
        ) from error
    config: Any = getattr(merged, "config", None)
    if getattr(config, "tie_word_embeddings", False):
        ends = merged.get_input_embeddings(), merged.get_output_embeddings()
        # An adapter of one of them has untied them.
        config.tie_word_embeddings = len({id(end.weight) for end in ends if end is not None}) == 1
    return merged


def _merge_layer(layer: Any) -> None:
    """Merge the adapters of a layer; its parameters become its own, since they may be tied."""
    sharded = []
    for module in layer.modules():
        for name, parameter in _parameters(module):
            whole: Tensor = parameter
            if isinstance(parameter, DTensor):  # peft assigns to `data`, which a DTensor ignores
                sharded.append((module, name, parameter))
                whole = parameter.full_tensor()
            own = nn.Parameter(whole.detach().clone(), requires_grad=False)
            module._parameters[name] = own  # noqa: SLF001
    layer.merge(safe_merge=True)
    for module, name, like in sharded:
        [whole] = (own for key, own in _parameters(module) if key == name)
        mesh = like.device_mesh
        everywhere = DTensor.from_local(whole.data, mesh, [Replicate()] * mesh.ndim)
        shard = everywhere.redistribute(placements=like.placements).clone()  # not a view of all
        module._parameters[name] = nn.Parameter(shard, requires_grad=False)  # noqa: SLF001


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters of one module, tied ones too."""
    return list(module.named_parameters(recurse=False, remove_duplicate=False))


def _without_wrappers(model: Any) -> Any:
    """A model over the same parameters whose parts have no wrappers: peft goes by their names."""
    model.state_dict()  # FSDP2 reshards what a forward has gathered
    return _shallow_copy(model, {}, has_own=False)


def _shallow_copy(module: nn.Module, known: dict[int, Any], *, has_own: bool = True) -> Any:
    """A copy of a tree of modules, FSDP2's too, without wrappers.

    It has the same parameters, or if `has_own`, parameters of its own over one memory.
    """
    module = unwrapped(module)
    if id(module) in known:
        return known[id(module)]
    known[id(module)] = made = object.__new__(type(module))
    for name, value in vars(module).items():
        if name == "config":  # one of all modules, which peft may change
            vars(made)[name] = known.setdefault(id(value), copy.copy(value))
        else:
            vars(made)[name] = copy.copy(value) if isinstance(value, list | dict | set) else value
    for name, parameter in _parameters(module) if has_own else []:
        if type(parameter) not in {nn.Parameter, DTensor}:
            raise StateError(f"{name} is a {type(parameter).__name__}")
        if id(parameter) not in known:
            own = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            known[id(parameter)] = own
        made._parameters[name] = known[id(parameter)]
    for name, child in module._modules.items():  # noqa: SLF001
        copied = None if child is None else _shallow_copy(child, known, has_own=has_own)
        made._modules[name] = copied
    return made
