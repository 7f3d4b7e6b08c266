"""Copies of tensors on several ranks: those that differ are found, whatever says they are equal."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import remesh
from remesh.adapters.memory import DeviceMemory, digest_of
from remesh.checkpoint import local
from remesh.checkpoint.copies import SAMPLE_BLOCK_BYTES, SAMPLE_BLOCKS, sample_ranges
from remesh.core.dtypes import BY_NAME
from remesh.core.memory import Memory
from remesh.core.state import Role
from remesh.exchange import Exchange
from remesh.storage import MemoryStorage
from tests.engine.scenes import all_are, errors_of, errors_of_save
from tests.support import run_ranks


def as_copies(monkeypatch: pytest.MonkeyPatch, role: Role) -> None:
    """Let plain tensors count as copies that a framework holds."""
    describe = local.describe_local

    def described(state: Any, stored: Any = None) -> Any:
        description = describe(state, stored)
        description.tensors = [dataclasses.replace(e, role=role) for e in description.tensors]
        return description

    monkeypatch.setattr("remesh.checkpoint.agree.describe_local", described)


def differ(errors: Sequence[Exception], name: str) -> None:
    told = f"{name}: ranks 0 and 1 hold different values"
    all_are(errors, remesh.errors.DivergedReplicaError, told, 'buffers="rank0"')


@pytest.mark.parametrize("kind", ["array", "strided", "tensor"])
@pytest.mark.parametrize("at", [0, 50_001, 99_998, 149_999])
def test_one_element_that_differs_anywhere_is_found(kind: str, at: int) -> None:
    """Also where stages of a pipeline have equal layers but for what was trained so far."""

    def state_of(rank: int) -> dict[str, Any]:
        part = np.zeros((500, 300), np.float32)
        part.reshape(-1)[at] = rank
        if kind == "strided":
            return {"w": np.stack([part, part], axis=-1)[..., 0]}
        return {"w": torch.from_numpy(part) if kind == "tensor" else part}

    differ(errors_of_save(2, state_of), "w")


def test_stages_with_equal_names_are_found_when_their_layers_differ() -> None:
    """With equal values nothing is lost by storing one of them; with others the save fails."""
    storage = MemoryStorage()

    def train(exchange: Exchange) -> list[str]:
        layer = nn.LayerNorm(300_000)
        seen = []
        with remesh.Saver(group=exchange) as saver:
            saver.save({"model": layer}, storage, overwrite=True)
            with torch.no_grad():
                layer.weight[150_000] += exchange.rank
            try:
                saver.save({"model": layer}, storage, overwrite=True)
            except remesh.errors.DivergedReplicaError as error:
                seen.append(str(error))
        return seen

    for seen in run_ranks(2, train):
        assert "model.weight: ranks 0 and 1 hold different values" in seen[0]
        assert "as stages of a pipeline have, give them names of their own" in seen[0]


@pytest.mark.parametrize("role", [Role.EQUAL, Role.FIRST])
def test_copies_of_a_framework_that_differ_are_warned_of_once_but_not_buffers_of_ddp(
    role: Role, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    as_copies(monkeypatch, role)
    storage = MemoryStorage()

    def save(exchange: Exchange) -> None:
        with remesh.Saver(group=exchange) as saver:
            for _ in range(3):
                saver.save({"w": torch.full((4,), exchange.rank)}, storage, overwrite=True)

    run_ranks(3, save)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    if role is Role.FIRST:
        assert warnings == []
        assert remesh.Checkpoint(storage).read("w").tolist() == [0, 0, 0, 0]
        return
    assert len(warnings) == 1
    assert "copies of 1 tensors differ between ranks" in warnings[0]
    assert "w (ranks 0 and 1)" in warnings[0]
    assert "verify_replicas=True" in warnings[0]


@pytest.mark.parametrize("role", [Role.EQUAL, Role.FIRST])
@pytest.mark.parametrize("how", ["save", "saver", "background"])
def test_verify_replicas_finds_one_element_of_a_copy_of_a_framework(
    role: Role, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_copies(monkeypatch, role)
    storage = MemoryStorage()

    def save(exchange: Exchange) -> None:
        tensor = torch.zeros(150_000)
        tensor[50_001] = exchange.rank
        if how == "save":
            remesh.save({"w": tensor}, storage, verify_replicas=True, group=exchange)
            return
        with remesh.Saver(verify_replicas=True, group=exchange) as saver:
            (saver.save if how == "saver" else saver.save_async)({"w": tensor}, storage)

    differ(errors_of(2, save), "w")
    assert storage.list() == []


def test_verify_replicas_compares_what_descriptions_say() -> None:
    def save(exchange: Exchange, differs: bool) -> None:
        part = np.full(6, exchange.rank * differs)
        tensor = remesh.ShardedTensor.whole("w", part, replica_id=exchange.rank)
        remesh.save({"w": tensor}, storage, verify_replicas=True, overwrite=True, group=exchange)

    storage = MemoryStorage()
    run_ranks(2, save, False)
    differ(errors_of(2, save, True), "w")


@pytest.mark.parametrize("option", [{"verify_replicas": True}, {"compress": "zstd"}])
def test_ranks_that_ask_for_other_things_are_told(option: dict[str, Any]) -> None:
    storage = MemoryStorage()

    def save(exchange: Exchange) -> None:
        own = option if exchange.rank else {}
        remesh.save({"w": torch.ones(3)}, storage, group=exchange, **own)

    all_are(errors_of(2, save), Exception, "pass the same on all ranks")


@given(st.lists(st.integers(0, 400), max_size=4), st.sampled_from([1, 2, 4, 8, 16]))
def test_samples_are_small_and_spread_from_end_to_end(shape: list[int], itemsize: int) -> None:
    size = math.prod(shape)
    ranges = sample_ranges(tuple(shape), itemsize)
    most = SAMPLE_BLOCKS * SAMPLE_BLOCK_BYTES // itemsize
    assert sum(stop - start for start, stop in ranges) <= most
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    if size <= most:
        assert ranges == [(0, size)]
        return
    gaps = [right[0] - left[1] for left, right in itertools.pairwise(ranges)]
    assert min(gaps) >= 0
    row = shape[-1] if shape[-1] * itemsize <= SAMPLE_BLOCK_BYTES else 1
    assert max(gaps) - min(gaps) <= row
    assert all(start % row == stop % row == 0 for start, stop in ranges)


# ---------------------------------------------------------------------------------------------
# Digests of devices
# ---------------------------------------------------------------------------------------------


def on_device(monkeypatch: pytest.MonkeyPatch, ranks: set[int]) -> None:
    """Let the tensors of some ranks count as memory of a device."""

    def memory_of(array: Any, where: str, *, writable: bool = False) -> Memory:
        if threading.current_thread().name in {f"rank {rank}" for rank in ranks}:
            return DeviceMemory(array, BY_NAME["int64"].carrier)
        return real(array, where, writable=writable)

    real = local.memory_of
    monkeypatch.setattr(local, "memory_of", memory_of)


@pytest.mark.parametrize("ranks", [{0, 1}, {0}, {1}])
def test_copies_on_devices_and_hosts(ranks: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on a device is compared with one in host memory, too."""
    on_device(monkeypatch, ranks)
    storage = MemoryStorage()

    def save(exchange: Exchange, changed: int) -> None:
        tensor = torch.arange(100_000)
        tensor[70_001] += changed * exchange.rank
        remesh.save({"w": tensor}, storage, overwrite=True, group=exchange)

    run_ranks(2, save, 0)
    differ(errors_of(2, save, 1), "w")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_digests_of_devices_see_every_element_and_the_order(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remesh.adapters.memory._DIGEST_CHUNK", 256)
    tensor = torch.arange(size).to(dtype)
    digest = digest_of(tensor)
    assert len(digest) == 16
    assert digest_of(tensor.clone()) == digest
    assert digest_of(torch.stack([tensor, tensor], -1)[..., 0]) == digest
    assert digest_of(torch.cat([tensor.new_zeros(3), tensor])[3:]) == digest
    for at in {0, size // 2, size - 1} if size else set():
        for bit in {0, 8 * tensor.itemsize - 1}:
            changed = tensor.clone()
            changed.view(torch.uint8)[at * tensor.itemsize + bit // 8] ^= 1 << bit % 8
            assert digest_of(changed) != digest
    if size > 1:
        assert digest_of(tensor.flip(0)) != digest


def test_digests_of_negated_tensors_differ() -> None:
    """All words differ in their highest bits alone, which plain sums would not show."""
    signs = [1.0, -1.0]
    found = {
        digest_of((torch.ones(4, dtype=torch.float64) * torch.tensor(sign)).view(torch.int64))
        for sign in itertools.product(signs, repeat=4)
    }
    assert len(found) == 16
