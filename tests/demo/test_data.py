"""Every layout sees the same batches."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remesh.demo.data import END_OF_TOPIC, VOCAB_SIZE, global_batch, read_tokens, slice_of

TOKENS = read_tokens()


def test_tokens_are_the_topics_in_order() -> None:
    topics_read = bytes(token if token != END_OF_TOPIC else 0 for token in TOKENS.tolist()).split(
        b"\0"
    )
    assert topics_read[:-1] == [topics[name].encode() for name in sorted(topics)]
    assert topics_read[-1] == b""
    assert int(TOKENS.max()) == END_OF_TOPIC == VOCAB_SIZE - 1


def test_targets_are_inputs_moved_on() -> None:
    batch = global_batch(TOKENS, seed=3, step=5, num_sequences=4, seq_len=16)
    assert batch.inputs.shape == batch.targets.shape == (4, 16)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    text = bytes(TOKENS.clamp(max=255).tolist())
    window = [*batch.inputs[0].clamp(max=255).tolist(), int(batch.targets[0, -1].clamp(max=255))]
    assert bytes(window) in text


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_a_batch_depends_on_seed_and_step_alone(seed: int, step: int) -> None:
    first = global_batch(TOKENS, seed=seed, step=step, num_sequences=3, seq_len=32)
    again = global_batch(TOKENS, seed=seed, step=step, num_sequences=3, seq_len=32)
    other = global_batch(TOKENS, seed=seed, step=step + 1, num_sequences=3, seq_len=32)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, other.inputs)


@given(st.integers(1, 8), st.integers(1, 4))
def test_slices_are_the_batch(num_parts: int, per_part: int) -> None:
    batch = global_batch(TOKENS, seed=1, step=2, num_sequences=num_parts * per_part, seq_len=8)
    slices = [slice_of(batch, part, num_parts) for part in range(num_parts)]
    assert {len(part.inputs) for part in slices} == {per_part}
    assert torch.equal(torch.cat([part.inputs for part in slices]), batch.inputs)
    assert torch.equal(torch.cat([part.targets for part in slices]), batch.targets)


def test_unequal_slices_are_refused() -> None:
    batch = global_batch(TOKENS, seed=1, step=2, num_sequences=6, seq_len=8)
    with pytest.raises(ValueError, match="6 sequences do not cut into 4"):
        slice_of(batch, 0, 4)
