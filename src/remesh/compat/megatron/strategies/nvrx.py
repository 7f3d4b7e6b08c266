"""Answers about NVIDIA's resiliency extension and its saves in the background.

The drop-in's saves are scheduled by the drop-in's own queue (`async_strategy="mcore"`), whether the
extension is installed or not. Its local checkpoints are another matter: Megatron's own
`tensor_aware_state_dict` serves them, over the drop-in's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def has_nvrx_async_support() -> bool:
    """False: the extension's queue writes in another process, without the memory of the shards."""
    return False


def make_nvrx_async_request(
    async_request_cls: Callable[..., Any],
    async_fn: Callable[..., Any] | None,
    async_fn_args: tuple[Any, ...],
    finalize_fns: list[Callable[..., Any]],
    async_fn_kwargs: Mapping[str, Any] | None = None,
    preload_fn: Callable[..., Any] | None = None,
) -> Any:
    """A request of a class of requests; see `AsyncRequest` for the arguments."""
    return async_request_cls(
        async_fn,
        async_fn_args,
        finalize_fns,
        async_fn_kwargs=dict(async_fn_kwargs or {}),
        preload_fn=preload_fn,
    )
