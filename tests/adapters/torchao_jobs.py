"""Models and optimizers of torchao, and their content as bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

LOW_BIT = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
OPTIMIZERS = (*LOW_BIT, "Adam8bit")
QUANTISED = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "IntxWeightOnlyConfig",
    "Float8WeightOnlyConfig",
)


def optimizer(name: str, model: nn.Module) -> Any:
    """An optimizer of torchao or torch."""
    import torchao.optim

    home = torchao.optim if hasattr(torchao.optim, name) else torch.optim
    return getattr(home, name)(model.parameters(), lr=0.01)


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def inner_bytes(tensor: Any) -> dict[str, bytes]:
    """The bytes of the tensors that a tensor is made of."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "__tensor_flatten__"):
        return {"": bytes_of(local)}
    return {
        f"{name}.{inner}".strip("."): content
        for name in local.__tensor_flatten__()[0]
        for inner, content in inner_bytes(getattr(local, name)).items()
    }


def states(optimizer: Optimizer) -> dict[tuple[int, str, str], bytes]:
    """The bytes of the tensors that an optimizer keeps."""
    return {
        (number, key, name): content
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        for name, content in inner_bytes(value).items()
    }


def quantised(name: str, seed: int) -> Any:
    """A model whose weights are quantised."""
    import torchao.quantization as quantization

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    quantization.quantize_(model, getattr(quantization, name)())
    return model


def int4(seed: int) -> Any:
    """A weight in groups of 32, two codes in each byte; made by hand, as kernels need a GPU."""
    from torchao.quantization import Int4Tensor

    torch.manual_seed(seed)
    codes = torch.randint(-128, 127, (16, 32), dtype=torch.int8)
    scale, zero = torch.rand(2, 16).bfloat16() + 1, torch.zeros(2, 16).bfloat16()
    return Int4Tensor(codes, scale, zero, [1, 32], torch.Size([16, 64]))


def nf4(seed: int) -> Any:
    """A weight of QLoRA."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    torch.manual_seed(seed)
    return to_nf4(torch.randn(64, 64), 64, 8)


def float8(seed: int) -> Any:
    """A model whose weights are wrapped for FSDP2's gathering of float8."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)
