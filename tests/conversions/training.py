"""A step of training in any layout, on real process groups, as plainly as it can be written.

Every rank computes its chunks for its rows of the batch, with fp32 copies of the parameters, passes
activations on to the next stage and gradients back, and adds up its gradients with those who hold
the same parameters: key-value heads that tensor-parallel ranks have copies of, the embedding that
the first and the last stage share, and everything among data-parallel ranks. Where rows of
parameters are cut, FSDP2 does the casting and the adding.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.func import functional_call

from tests.conversions.jobs import Job, Links
from tests.conversions.layouts import MASTER, whole_shapes
from tests.conversions.model import Mixture

BATCH, NUM_WORDS = 4, 6
ROUTER_RATE = 0.0625

Gradients = dict[torch.Tensor, torch.Tensor]
"""Those of parameters."""


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
    """Train; the mean loss of each step on ranks that have the last chunk, else nothing."""
    losses = []
    for _ in range(num_steps):
        loss = train_step(job)
        if loss is not None:
            losses.append(loss)
    return losses


def train_step(job: Job) -> float | None:
    links = linked(job)
    batch = torch.randint(job.shape.vocabulary, (BATCH, NUM_WORDS), generator=job.generator)
    words = batch.chunk(links.data.size)[links.data.rank]
    run = rows_cut if job.layout.cuts_parameters else copies_kept
    loss, gradients = run(job, words)
    update(job, gradients)
    balance(job)
    job.step += 1
    if loss is None:
        return None
    return float(links.data.summed(loss.detach()) / links.data.size)


def linked(job: Job) -> Links:
    assert job.links is not None
    return job.links


def rows_cut(job: Job, words: torch.Tensor) -> tuple[torch.Tensor | None, Gradients]:
    loss: torch.Tensor = job.module(None, words)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for local in job.locals:
        assert local.parameter.grad is not None
        gradients[local.parameter] = local.parameter.grad
        local.parameter.grad = None
    return loss, gradients


def copies_kept(job: Job, words: torch.Tensor) -> tuple[torch.Tensor | None, Gradients]:
    copies = {
        number: {
            name: parameter.detach().float().requires_grad_()
            for name, parameter in chunk.named_parameters()
        }
        for number, chunk in job.chunks.items()
    }
    loss = through_chunks(job, copies, words)
    gradients = {}
    found = [
        copy.grad if copy.grad is not None else torch.zeros_like(copy)
        for of_chunk in copies.values()
        for copy in of_chunk.values()
    ]
    for local, gradient in zip(job.locals, found, strict=True):
        gradients[local.parameter] = added_up(job, local.name, gradient)
    return loss, gradients


def through_chunks(
    job: Job, copies: dict[int, dict[str, torch.Tensor]], words: torch.Tensor
) -> torch.Tensor | None:
    """All chunks forward and backward; the loss where the last one is."""
    stages = linked(job).stages
    last = job.layout.pp * job.layout.chunks - 1
    between = torch.empty(*words.shape, job.shape.hidden)
    passed = []
    loss = None
    for number, chunk in job.chunks.items():
        x = received(job, number - 1, between).requires_grad_() if number else None
        y = functional_call(chunk, copies[number], (x, words))
        passed.append((number, x, y))
        if number == last:
            loss = y
        else:
            dist.send(y.detach().contiguous(), group=stages.group, group_dst=owner(job, number + 1))
    for number, x, y in reversed(passed):
        if number == last:
            y.backward()
        else:
            y.backward(received(job, number + 1, between))
        if x is not None:
            assert x.grad is not None
            gradient = x.grad.contiguous()
            dist.send(gradient, group=stages.group, group_dst=owner(job, number - 1))
    return loss


def owner(job: Job, chunk: int) -> int:
    return chunk % job.layout.pp


def received(job: Job, chunk: int, like: torch.Tensor) -> torch.Tensor:
    x = torch.empty_like(like)
    dist.recv(x, group=linked(job).stages.group, group_src=owner(job, chunk))
    return x


def added_up(job: Job, name: str, gradient: torch.Tensor) -> torch.Tensor:
    """The mean gradient of a parameter over the batch, from that of this rank's loss."""
    links, shape = linked(job), job.shape
    if "qkv" in name and links.kv.size > 1:
        own_heads = shape.num_heads * shape.head_size // job.layout.tp
        gradient[own_heads:] = links.kv.summed(gradient[own_heads:])
    if name == "embedding.weight" and links.stages.size > 1:
        gradient = links.ends.summed(gradient)
    # The experts have had the tokens of all expert-parallel ranks already.
    sharers = links.copies if "experts" in name else links.data
    return sharers.summed(gradient) / links.data.size


def update(job: Job, gradients: Gradients) -> None:
    """Step the optimizer over the master copies, and round these to the parameters."""
    if job.layout.kind == "zero-flat":
        update_flat(job, gradients)
        return
    meant = job.optimizer.stands_for
    for slot in job.slots:
        parameter = meant[slot.tensor]
        assert isinstance(parameter, torch.Tensor)
        slot.tensor.grad = gradients[parameter].bfloat16().float()
    job.optimizer.optimizer.step()
    with torch.no_grad():
        for slot in job.slots:
            parameter = meant[slot.tensor]
            assert isinstance(parameter, torch.Tensor)
            parameter.copy_(slot.tensor)
    if job.layout.kind == "zero-parameter":
        for number, local in enumerate(job.locals):
            data = local.parameter.detach().float()  # gloo does not know every dtype
            dist.broadcast(data, group=linked(job).copies.group, group_src=number % job.num_owners)
            local.parameter.detach().copy_(data)


def update_flat(job: Job, gradients: Gradients) -> None:
    owners = linked(job).copies
    (slot,) = job.slots
    size = len(slot.tensor)
    whole = torch.zeros(size * owners.size)
    places = list(zip(job.locals, job.offsets, strict=True))
    for local, offset in places:
        gradient = gradients[local.parameter].flatten()
        whole[offset : offset + len(gradient)] = gradient
    slot.tensor.grad = whole[owners.rank * size : (owners.rank + 1) * size].bfloat16().float()
    job.optimizer.optimizer.step()
    masters = torch.cat(owners.all_of(slot.tensor.detach()))
    for local, offset in places:
        own = masters[offset : offset + local.parameter.numel()]
        local.parameter.detach().copy_(own.view(local.parameter.shape))


def balance(job: Job) -> None:
    """Move the router's bias towards experts that had fewer tokens than the mean."""
    for chunk in job.chunks.values():
        for mixture in chunk.modules():
            if isinstance(mixture, Mixture):
                num_tokens = linked(job).data.summed(mixture.num_tokens)
                mixture.router_bias += ROUTER_RATE * (num_tokens.mean() - num_tokens).sign()
