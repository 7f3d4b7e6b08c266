"""Between the names in Hugging Face files and those of the modules of transformers.

Since transformers 5 some modules have other tensors than their files: experts lie in one tensor,
gate and up projections in one. transformers has a table that says how, for each of its models, and
applies it in `from_pretrained` and `save_pretrained`. Here an entry of that table becomes
statements: patterns are matched with the names of the module's tensors, so each statement names the
tensors that it joins, and a load reads those alone.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from remesh.core.index import Index
from remesh.core.state import Path, name_of
from remesh.errors import TransformError
from remesh.transform import Transform

Shape = tuple[int, ...]


def huggingface_to_module(model: Any, *, prefix: str = "") -> Transform:
    """From the names in Hugging Face files to those of a module of transformers.

    Args:
        model: The module; it may be sharded, or on the meta device.
        prefix: What the names of the module begin with in the state, such as `model.`.

    Raises:
        TransformError: If transformers converts a tensor of the model in a way that the
            transformation language does not have.
    """
    return Transform(_statements(model, prefix))


def module_to_huggingface(model: Any, *, prefix: str = "") -> Transform:
    """From the names of a module of transformers to those in Hugging Face files.

    Args:
        model: See `huggingface_to_module`.
        prefix: See `huggingface_to_module`; it is not part of the names in the files.

    Raises:
        TransformError: See `huggingface_to_module`.
    """
    return huggingface_to_module(model, prefix=prefix).reversed()


def suggested_call(state: Any, stored: Index, missing: Collection[str]) -> tuple[str, str] | None:
    """The class of a model and the call of `huggingface_to_module` that makes what is missing.

    None if no model of transformers in the state has a recipe that makes all that is missing of it.
    """
    root = "state" if isinstance(state, Mapping) else "model"
    for path, said, model in _models_in(state, (), root):
        prefix = name_of((*path, ""))
        own = {name for name in missing if name.startswith(prefix)}
        # transformers' own code runs here, and what it raises must not hide what is told.
        with suppress(Exception):
            if own and _statements(model, ""):
                made = huggingface_to_module(model, prefix=prefix).resolve(stored).targets
                if own.issubset(made):
                    argument = f', prefix="{prefix}"' if prefix else ""
                    return type(model).__name__, f"huggingface_to_module({said}{argument})"
    return None


def suggested_ties(state: Any, stored: Index, missing: Collection[str]) -> str:
    """Statements that make missing weights of those to which transformers can tie them."""
    statements = []
    for path, _, model in _models_in(state, (), ""):
        ties = getattr(model, "_tied_weights_keys", None)
        for name, other in ties.items() if isinstance(ties, Mapping) else ():
            target, source = name_of((*path, name)), name_of((*path, other))
            if target in missing and source in stored:
                statements.append(f"{source} -> {target}")
    return "\n".join(statements)


_INNER = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Where a module that wraps another one, under its names, has it."""


def _models_in(node: Any, path: Path, said: str) -> Iterator[tuple[Path, str, Any]]:
    """The models of transformers in a state: place, how a program says it, model."""
    inner = _INNER.get(type(node).__name__)
    known = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if known is None:
        return
    if inner is not None:
        yield from _models_in(getattr(node, inner), path, f"{said}.{inner}")
    elif isinstance(node, known):
        yield path, said, node
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _models_in(child, (*path, key), f"{said}[{key!r}]")


@dataclass(slots=True)
class _Group:
    """Tensors of a module that are made together of tensors of the files."""

    converter: Any  # the entry of transformers' table
    sources: list[str]  # names in the files, with a star for a number, in the order of the entry
    targets: dict[int, str] = field(default_factory=dict)
    """Names in the module, by their number in the entry."""


def _statements(model: Any, prefix: str) -> list[str]:
    """Statements that make the tensors of a module of those in its files."""
    forward = _table_of(model)
    pairs = [(one, one.reverse_transform()) for one in reversed(forward)]
    renamings = [back for one, back in pairs if not hasattr(one, "operations")]
    converters = [(one, back) for one, back in pairs if hasattr(one, "operations")]
    shapes = _shapes_of(model)
    statements: list[str] = []
    groups: dict[str, _Group] = {}
    for name in shapes:
        for converter, back in converters:
            renamed, pattern = back.rename_source_key(name)
            if pattern is not None:
                if renamed not in groups:
                    groups[renamed] = _group_of(converter, back, renamed, renamings)
                groups[renamed].targets[back.source_patterns.index(pattern)] = name
                break
        else:
            stored = _renamed(name, renamings)
            if stored != prefix + name:
                statements.append(f"{quoted(stored)} -> {quoted(prefix + name)}")
    for group in groups.values():
        statements += _statements_of(group, shapes, prefix)
    return statements


def _table_of(model: Any) -> list[Any]:
    """The entries of transformers' table for a model."""
    try:
        from transformers import conversion_mapping
    except ImportError as error:
        raise TransformError(
            "the names of Hugging Face models are known by transformers 5; pip install "
            "'transformers>=5'"
        ) from error
    entries = conversion_mapping.get_model_conversion_mapping(_unwrapped(model), add_legacy=False)
    # Which prefix a file had is known only to who has loaded it.
    return [entry for entry in entries if type(entry).__name__ != "PrefixChange"]


def _unwrapped(module: Any) -> Any:
    """The same module with the classes that it had before `fully_shard`, which the table names."""
    kind = type(module)
    if any(base.__module__.startswith("torch.distributed.") for base in kind.__bases__):
        kind = kind.__bases__[-1]
    plain = object.__new__(kind)
    modules = {name: one and _unwrapped(one) for name, one in vars(module)["_modules"].items()}
    vars(plain).update({**vars(module), "_modules": modules})
    return plain


def _shapes_of(model: Any) -> dict[str, Shape]:
    """Name → shape of the tensors that a module has; of tied ones the first."""
    parameters = {name: tuple(one.shape) for name, one in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    rest = {
        name: tuple(one.shape)
        for name, one in model.state_dict().items()
        if name not in tied and hasattr(one, "shape")
    }
    return parameters | rest


def _group_of(converter: Any, back: Any, renamed: str, renamings: Sequence[Any]) -> _Group:
    first, *others = back.target_patterns
    if others and first not in renamed:
        raise _unknown(converter, f"its patterns {back.target_patterns}")
    names = [renamed, *(renamed.replace(first, other, 1) for other in others)]
    return _Group(converter, [_renamed(name, renamings) for name in names])


def _renamed(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name


def quoted(name: str) -> str:
    """A name as statements spell it."""
    return f'"{name}"'


def listed(names: Sequence[str]) -> str:
    """Names as statements spell them."""
    return ", ".join(map(quoted, names))


def _statements_of(group: _Group, shapes: Mapping[str, Shape], prefix: str) -> list[str]:
    """The operations of an entry, one after the other, with names between them."""
    targets = [group.targets[number] for number in sorted(group.targets)]
    shape = shapes[targets[0]]
    operations = list(group.converter.operations)
    current = [_expanded(group, source, operations[0], shape) for source in group.sources]
    targets = [prefix + target for target in targets]
    statements = []
    for number, operation in enumerate(operations):
        is_last = number == len(operations) - 1
        kind = type(operation).__name__
        results = (
            targets if is_last else [f"{targets[0]}._{number}_{n}" for n in range(len(current))]
        )
        if kind == "MergeModulelist" and len(results) == len(current):
            statements += [
                f"{listed(names)} -> {quoted(result)}, stack={operation.dim}"
                for names, result in zip(current, results, strict=True)
            ]
            current = [[result] for result in results]
            continue
        names = [name for some in current for name in some]
        if kind == "Concatenate":
            attribute, results = f"axis={operation.dim}", results[:1]
        elif kind in ("Chunk", "Split") and is_last and len(names) == 1:
            attribute = f"axis={operation.dim}" + ", sizes=targets" * (kind == "Split")
        elif kind == "Transpose" and not operation.check_dims and len(names) == len(results) == 1:
            attribute = f"permute={_order(operation, len(shape))}"
        else:
            raise _unknown(group.converter, kind)
        statements.append(f"{listed(names)} -> {listed(results)}, {attribute}")
        current = [[result] for result in results]
    return statements


def _expanded(group: _Group, source: str, operation: Any, shape: Shape) -> list[str]:
    """The names in the files that a name with a star stands for."""
    if "*" not in source:
        return [source]
    if type(operation).__name__ != "MergeModulelist":
        raise _unknown(group.converter, f"its pattern {source}")
    return [source.replace("*", str(number)) for number in range(shape[operation.dim])]


def _order(operation: Any, ndim: int) -> list[int]:
    order = list(range(ndim))
    one, other = operation.dim0, operation.dim1
    order[one], order[other] = order[other], order[one]
    return order


def _unknown(converter: Any, what: str) -> TransformError:
    return TransformError(
        f"transformers makes {', '.join(converter.target_patterns)} with {what}, for which there "
        "is no statement; load the model with from_pretrained and save it with remesh"
    )
