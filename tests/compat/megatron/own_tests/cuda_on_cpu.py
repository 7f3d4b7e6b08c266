"""What Megatron needs of CUDA, on the CPU with gloo; nothing of Megatron is changed.

Megatron names the device ("cuda") where it makes tensors and calls `torch.cuda` for streams, random
states and memory figures. `install` makes "cuda" mean the CPU and these calls do nothing. Imported
by scripts that run Megatron's code, in processes of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

NUM_DEVICES = 8


def _on_cpu(device: Any) -> Any:
    return "cpu" if str(device).startswith("cuda") else device


class _CpuForCuda(TorchFunctionMode):
    """Makes tensors on the CPU where CUDA is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if func is torch.Tensor.to:
            args = tuple(
                _on_cpu(arg) if isinstance(arg, str | torch.device) else arg for arg in args
            )
        elif func is torch.device and args:
            args = (_on_cpu(args[0]), *args[1:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream:
    """A stream or an event: everything has been done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None: ...


def _gives(value: Any) -> Callable[..., Any]:
    """A new function: torch's compiler keeps a table of them and wants each but once."""
    return lambda *args, **kwargs: value


def _no_change() -> Callable[..., Any]:
    @contextlib.contextmanager
    def unchanged(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    return unchanged


def _put(owner: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(owner, name, value)


def install() -> None:
    """Make "cuda" mean the CPU, and "nccl" gloo, in this process."""
    _put(
        torch.cuda,
        Event=_Stream,
        Stream=_Stream,
        current_device=_gives("cpu"),
        current_stream=_gives(_Stream()),
        default_stream=_gives(_Stream()),
        device=_no_change(),
        device_count=_gives(NUM_DEVICES),
        empty_cache=_gives(None),
        get_device_capability=_gives((8, 0)),
        get_device_properties=_gives(
            SimpleNamespace(major=8, minor=0, multi_processor_count=1, total_memory=1 << 26)
        ),
        get_rng_state=lambda *_, **__: torch.get_rng_state(),
        manual_seed=_gives(None),
        manual_seed_all=_gives(None),
        max_memory_allocated=_gives(0),
        max_memory_reserved=_gives(0),
        memory_allocated=_gives(0),
        memory_reserved=_gives(0),
        memory_stats=_gives({}),
        reset_peak_memory_stats=_gives(None),
        set_device=_gives(None),
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        stream=_no_change(),
        synchronize=_gives(None),
    )
    for name in ("get_rng_state", "set_rng_state"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    # Megatron sets the state of its generators through these.
    _put(torch.cuda, _lazy_call=lambda call, **_: call(), default_generators=_Generators())
    _put(torch.Tensor, cuda=lambda self, *_, **__: self, pin_memory=lambda self, *_: self)
    _put(torch.nn.Module, cuda=lambda self, *_: self)
    np.product = np.prod  # type: ignore[attr-defined]  # older Megatron calls it
    _gloo_for_nccl()
    mode: Any = _CpuForCuda()
    mode.__enter__()


class _Generators:
    """One generator for every device."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


def _gloo_for_nccl() -> None:
    init, new_group, from_group = (
        dist.init_process_group,
        dist.new_group,
        device_mesh.DeviceMesh.from_group,
    )

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init("gloo", *args, **kwargs)

    def new_gloo_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.update(backend="gloo", pg_options=None)
        return new_group(ranks, *args, **kwargs)

    def mesh_from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return from_group(group, _on_cpu(device_type), *args, **kwargs)

    _put(dist, init_process_group=init_process_group, new_group=new_gloo_group)
    _put(device_mesh.DeviceMesh, from_group=staticmethod(mesh_from_group))


class FusedAdam(torch.optim.Optimizer):
    """Adam as Apex has it: the step is kept in the group, the moments alone are state."""

    def __init__(
        self,
        params: Any,
        lr: float | None = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (beta, beta_sq), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                for name in ("exp_avg", "exp_avg_sq"):
                    state.setdefault(name, torch.zeros_like(param))
                state["exp_avg"].lerp_(param.grad, 1 - beta)
                state["exp_avg_sq"].mul_(beta_sq).addcmul_(
                    param.grad, param.grad, value=1 - beta_sq
                )
                scale = (state["exp_avg_sq"] / (1 - beta_sq**step)).sqrt_().add_(group["eps"])
                param.mul_(1 - lr * group["weight_decay"])
                param.addcdiv_(state["exp_avg"], scale, value=-lr / (1 - beta**step))


def with_fused_adam() -> None:
    """Megatron's optimizers on `FusedAdam`: those on torch's own Adam it can save, but not load."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    _put(optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    _put(distributed, Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


def with_fused_norm() -> None:
    """Layer norms as Apex has them, which take part in sequence parallelism."""
    place: Any = importlib.import_module("megatron.core.transformer.torch_norm")

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        made = torch.nn.LayerNorm(hidden_size, eps)
        for param in made.parameters():
            _put(param, sequence_parallel=config.sequence_parallel)
        return made

    place.WrappedTorchNorm.__new__ = norm


def without_transformer_engine() -> None:
    """Megatron's local layers where its tests ask for those of Transformer Engine."""
    utils: Any = importlib.import_module("megatron.core.utils")
    # Where it is not installed its version is None, which the tests compare.
    utils.get_te_version = lambda: Version("0")
    models = "megatron.core.models"
    gpt: Any = importlib.import_module(f"{models}.gpt.gpt_layer_specs")
    known = inspect.signature(gpt.get_gpt_layer_local_spec).parameters

    def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> Any:
        taken = {name: value for name, value in kwargs.items() if name in known}
        return gpt.get_gpt_layer_local_spec(*args, **taken)

    gpt.TENorm = gpt.LNImpl
    gpt.get_gpt_layer_with_transformer_engine_spec = get_gpt_layer_with_transformer_engine_spec
    bert: Any = importlib.import_module(f"{models}.bert.bert_layer_specs")
    bert.bert_layer_with_transformer_engine_spec = bert.bert_layer_local_spec
    bert.get_bert_layer_with_transformer_engine_spec = lambda: bert.bert_layer_local_spec
    t5: Any = importlib.import_module(f"{models}.T5.t5_spec")
    for coder in ("encoder", "decoder"):
        local = getattr(t5, f"{coder}_model_with_local_spec")
        setattr(t5, f"{coder}_model_with_transformer_engine_default_spec", local)
