"""A step of training that is the same in any layout: what ranks hold is put together and cut again.

A step draws the batch of the whole job from a generator that all ranks have. Every rank computes
the loss of the whole model in fp32, and takes from its gradient, rounded once to bfloat16, what it
holds of the optimizer. The optimizer steps over that, and the master copies, put together, are
rounded to the parameters.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.distributed as dist

from tests.conversions.jobs import Job, memory
from tests.conversions.layouts import (
    BY_NAME,
    MASTER,
    Held,
    global_name,
    put_together,
    random_state,
    whole_shapes,
)
from tests.conversions.model import Chunk, Mixture, Shape

BATCH, NUM_WORDS = 4, 6
ROUTER_RATE = 0.0625


def start(job: Job, seed: int) -> None:
    """Give a fresh job parameters that do not depend on its layout."""
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, torch.Tensor] = {}
    for name, shape in sorted(whole_shapes(job.shape).items()):
        base = 1.0 if name.endswith("norm.weight") else 0.0
        value = base + 0.3 * torch.randn(math.prod(shape), generator=generator)
        values[name] = torch.zeros_like(value) if name.endswith("router_bias") else value
    for one in job.held(moments=False):
        name = one.key.removeprefix("model.").removesuffix(f".{MASTER}")
        one.fill(values[name].bfloat16().to(one.elements.dtype))


def train(job: Job, num_steps: int) -> list[float]:
    return [_train_step(job) for _ in range(num_steps)]


def _train_step(job: Job) -> float:
    words = torch.randint(job.shape.vocabulary, (BATCH, NUM_WORDS), generator=job.generator)
    model = _whole_model(job)
    loss: torch.Tensor = model(words)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.flatten().bfloat16().float()
    for slot in job.slots:
        slot.tensor.grad = torch.zeros_like(slot.tensor)
        elements = memory(slot.tensor.grad)
        for name, first, numbers in slot.stretches:
            own = elements[first : first + len(numbers)]
            Held(name, own, numbers).fill(gradients[name])
    job.optimizer.optimizer.step()
    masters = _whole_state(job, masters=True)
    for local in job.locals:
        held = Held(local.name, memory(local.parameter), job.own_numbers(local))
        held.fill(masters[f"{local.name}.{MASTER}"].bfloat16())
    _balance(job, model)
    job.step += 1
    return loss.item()


@functools.cache
def _any_state(shape: Shape) -> dict[str, torch.Tensor]:
    return random_state(shape, 0)


def _whole_state(job: Job, *, masters: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers, or the master copies, of what all ranks hold."""
    assert job.group is not None
    own = [one for one in job.held(moments=False) if one.key.endswith(MASTER) == masters]
    held: list[Any] = [None] * job.layout.world_size
    dist.all_gather_object(held, own, group=job.group.ranks)
    like = _any_state(job.shape)
    wanted = {one.key for theirs in held for one in theirs}
    return put_together(held, {key: like[key] for key in like if key in wanted})


def _whole_model(job: Job) -> Chunk:
    model = Chunk(job.shape, BY_NAME["dp1"].place(0, 0, job.shape))
    whole = _whole_state(job, masters=False)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(whole[f"model.{name}"].view(tensor.shape))
    return model


def _balance(job: Job, model: Chunk) -> None:
    """Move the router's bias towards experts that had fewer tokens than the mean."""
    for mixture in model.modules():
        if isinstance(mixture, Mixture):
            num_tokens = mixture.num_tokens
            mixture.router_bias += ROUTER_RATE * (num_tokens.mean() - num_tokens).sign()
    moved = dict(model.named_buffers())
    for chunk in job.chunks.values():
        for name, buffer in chunk.named_buffers():
            buffer.copy_(moved[global_name(name, chunk)])
