"""Nested dicts and lists: map, merge, compare, take apart.

Only dicts and lists are containers here. Everything else is a leaf, tuples included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Container = dict[Any, Any] | list[Any]
Key = tuple[Any, ...]


def extract_matching_values(
    x: Container, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Any, Any]:
    """Split the leaves by a predicate, those that match first; both parts keep the containers.

    A list of which one element matches becomes a list of length one in the first part. An empty
    container does not match; a container that is empty after the split is left out. With
    `return_lists_as_dicts`, lists become dicts by position, so that no place is lost.
    """
    if not isinstance(x, dict | list):
        raise ValueError(f"only a dict or a list can be taken apart, not a {type(x).__name__}")
    items = x.items() if isinstance(x, dict) else enumerate(x)
    matching: dict[Any, Any] = {}
    others: dict[Any, Any] = {}
    for key, value in items:
        if isinstance(value, dict | list) and value:
            inside, outside = extract_matching_values(value, predicate, return_lists_as_dicts)
            if inside:
                matching[key] = inside
            if outside:
                others[key] = outside
        elif isinstance(value, dict | list):
            others[key] = {} if isinstance(value, list) and return_lists_as_dicts else type(value)()
        else:
            (matching if predicate(value) else others)[key] = value
    if isinstance(x, dict) or return_lists_as_dicts:
        return matching, others
    return list(matching.values()), list(others.values())


def diff(x1: Any, x2: Any, prefix: Key = ()) -> tuple[list[Any], list[Any], list[Any]]:
    """How two nested values differ.

    Returns paths that only the left has, paths that only the right has, and for each value that
    differs `(path, type on the left, type on the right, ...)`. Tensors differ if any element does;
    what follows the types then says where.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        left = [(*prefix, key) for key in x1 if key not in x2]
        right = [(*prefix, key) for key in x2 if key not in x1]
        pairs = [((*prefix, key), x1[key], x2[key]) for key in x1 if key in x2]
    elif isinstance(x1, list | tuple | np.ndarray) and type(x1) is type(x2):
        left = [(*prefix, i) for i in range(len(x2), len(x1))]
        right = [(*prefix, i) for i in range(len(x1), len(x2))]
        pairs = [((*prefix, i), a, b) for i, (a, b) in enumerate(zip(x1, x2, strict=False))]
    elif hasattr(x1, "replica_id") and type(x1) is type(x2):
        left, right, pairs = [], [], [((*prefix, type(x1)), x1.data, x2.data)]
    else:
        details = _difference(x1, x2)
        return [], [], [] if details is None else [(prefix, type(x1), type(x2), *details)]
    mismatch: list[Any] = []
    for path, a, b in pairs:
        found = diff(a, b, path)
        for total, part in zip((left, right, mismatch), found, strict=True):
            total.extend(part)
    return left, right, mismatch


def _difference(x1: Any, x2: Any) -> tuple[Any, ...] | None:
    """The details of how two leaves differ, or None if they are equal."""
    if isinstance(x1, torch.Tensor) and isinstance(x2, torch.Tensor):
        if x1.shape != x2.shape:
            return x1.shape, x2.shape
        unequal = x1.cpu() != x2.cpu()
        return (unequal.sum(), unequal.shape, unequal.nonzero().tolist()) if unequal.any() else None
    try:
        return () if bool(x1 != x2) else None
    except (RuntimeError, ValueError, TypeError):
        # Values that cannot be compared are not known to be equal.
        return ()


def nested_values(x: Container) -> Iterator[Any]:
    """The leaves."""
    for _container, _key, value in nested_items_iter(x):
        yield value


def nested_items_iter(x: Container) -> Iterator[tuple[Any, Any, Any]]:
    """The leaves with their places: innermost container, key in it, leaf."""
    for key, value in list(x.items()) if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def dict_list_map_inplace(f: Callable[[Any], Any], x: Any) -> Any:
    """Replace each leaf by `f(leaf)`, in place; returns `x`, or `f(x)` if it is itself a leaf."""
    if not isinstance(x, dict | list):
        return f(x)
    for key in x if isinstance(x, dict) else range(len(x)):
        x[key] = dict_list_map_inplace(f, x[key])
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """New containers with `f(leaf)` in place of each leaf."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Any, x2: Any, key: Key = ()) -> Any:
    """Merge a nested value into another, in place, which is returned.

    Dicts unite; lists must be equally long and merge element by element. Two leaves that meet are
    an error.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
    elif isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(
                f"cannot merge lists of lengths {len(x1)} and {len(x2)} at {key}\nA list that mixes"
                " sharded and other entries cannot be put together again, use a dict"
            )
        for number, value in enumerate(x2):
            x1[number] = merge(x1[number], value, (*key, number))
    else:
        raise ValueError(
            f"two values meet at {key}: {type(x1).__name__} and {type(x2).__name__}\nOne of them is"
            " stored, the other in the state to load, under the same keys"
        )
    return x1
