"""A small model with known contents, in the parallel layouts that torch offers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """A gated pair of layers with an inner width that may divide by nothing, and a buffer."""

    steps: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(5, width)
        self.down = nn.Linear(width, 3)
        self.register_buffer("steps", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).tanh())
        return result


def known_net(width: int, start: float = 0.0) -> Net:
    """A `Net` whose elements are consecutive numbers, the same on every rank."""
    net = Net(width)
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.copy_(torch.arange(start, start + tensor.numel()).reshape(tensor.shape))
            start += tensor.numel()
    return net


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def fsdp(net: Net) -> nn.Module:
    mesh = mesh_of(torch.distributed.get_world_size())
    for layer in (net.up, net):
        fully_shard(layer, mesh=mesh)
    return net


def tensor_parallel(net: Net) -> nn.Module:
    return _sliced(net, mesh_of(torch.distributed.get_world_size()))


def _sliced(net: Net, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def hybrid_fsdp(net: Net) -> nn.Module:
    fully_shard(net, mesh=mesh_of(2, 2))
    return net


def fsdp_over_tensor_parallel(net: Net) -> nn.Module:
    mesh = mesh_of(2, 2)
    _sliced(net, mesh["tp"])
    for layer in (net.up, net.down, net):
        fully_shard(layer, mesh=mesh["dp"])
    return net


LAYOUTS: dict[int, dict[str, Callable[[Net], nn.Module]]] = {
    2: {"ddp": ddp, "fsdp": fsdp, "tensor_parallel": tensor_parallel},
    4: {
        "fsdp": fsdp,
        "hybrid_fsdp": hybrid_fsdp,
        "fsdp_over_tensor_parallel": fsdp_over_tensor_parallel,
    },
}
"""World size → name → how to bring a net into that layout."""
