"""Every layout sees the same batches."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from hypothesis import given
from hypothesis import strategies as st

from remesh.demo.training import END_OF_TOPIC, TrainConfig, batch_of, read_tokens

TOKENS = read_tokens()


def test_tokens_are_the_topics_in_order() -> None:
    topics_read = bytes(token if token != END_OF_TOPIC else 0 for token in TOKENS.tolist()).split(
        b"\0"
    )
    assert topics_read[:-1] == [topics[name].encode() for name in sorted(topics)]
    assert topics_read[-1] == b""
    assert int(TOKENS.max()) == END_OF_TOPIC == TrainConfig().model.vocab_size - 1


def test_targets_are_one_token_ahead_of_inputs() -> None:
    inputs, targets = batch_of(TOKENS, TrainConfig(seed=3, num_sequences=4, seq_len=16), 5)
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = bytes(TOKENS.clamp(max=255).tolist())
    window = [*inputs[0].clamp(max=255).tolist(), int(targets[0, -1].clamp(max=255))]
    assert bytes(window) in text


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_a_batch_depends_on_seed_and_step_alone(seed: int, step: int) -> None:
    config = TrainConfig(seed=seed, num_sequences=3, seq_len=32)
    (first, targets), (again, same) = (batch_of(TOKENS, config, step) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(targets, same)
    assert not torch.equal(first, batch_of(TOKENS, config, step + 1)[0])
