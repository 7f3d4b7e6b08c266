"""The ways in which the demo spreads one model over processes.

*FSDP2* shards every block and then the rest with `fully_shard`: each rank holds a slice of the
first dim of every parameter and trains on its slice of the batch; gradients are averaged.

*Tensor parallel* cuts the matrices inside a block, the first ones by their output, the last by
their input, so that a block needs one exchange after attention and one after the MLP. Between
them the residual stream is cut along the sequence, so the norms, whose weights every rank holds
whole, work on a part of it too. Every rank sees the whole batch.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from remesh.adapters.dtensor import local_tensor, parts_of_dtensor
from remesh.demo.config import Kind, Layout
from remesh.demo.messages import HeldTensor
from remesh.demo.model import Transformer
from remesh.geometry import Box


def apply_layout(model: Transformer, layout: Layout) -> None:
    """Spread a model, of which every rank holds an equal copy, over the default group."""
    if layout.kind is Kind.DATA_PARALLEL:
        return  # every rank keeps its copy
    mesh = init_device_mesh("cpu", (layout.num_ranks,))
    if layout.kind is Kind.FSDP2:
        _apply_fsdp(model, mesh)
    else:
        _apply_tensor_parallel(model, mesh)


def _apply_fsdp(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _apply_tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        plan: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": _gather_sequence(),
            "attention.q_proj": ColwiseParallel(),
            "attention.k_proj": ColwiseParallel(),
            "attention.v_proj": ColwiseParallel(),
            "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "mlp_norm": SequenceParallel(),
            "mlp": _gather_sequence(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    if model.config.tied_embeddings:
        # Cutting the two modules made two parameters of the one that they shared.
        model.output.weight = model.embedding.weight


def _gather_sequence() -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def held_tensors(model: nn.Module) -> tuple[HeldTensor, ...]:
    """This rank's boxes of every parameter."""
    return tuple(
        HeldTensor(name, tuple(parameter.shape), _boxes(name, parameter))
        for name, parameter in model.named_parameters()
    )


def _boxes(name: str, tensor: Tensor) -> tuple[Box, ...]:
    if not isinstance(tensor, DTensor):
        return (Box.whole(tuple(tensor.shape)),)
    return tuple(part.box for part in parts_of_dtensor(tensor, local_tensor(tensor), name))
