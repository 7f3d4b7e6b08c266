"""The text that the demo trains on, and which part of it every step sees.

The text is Python's own help topics, which ship with the interpreter: real English, nothing to
download. It is read as bytes, with an extra token after each topic.

The batch of a step is a pure function of (seed, step). A data-parallel rank takes its slice of
that global batch, a tensor-parallel rank takes all of it, and so every layout trains on the same
sequence of batches, wherever it starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

END_OF_TOPIC = 256
VOCAB_SIZE = 257


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences of tokens and, for each token, the one to be predicted from it.

    Attributes:
        inputs: (sequences, seq_len), int64.
        targets: Same shape: the inputs moved on by one token.
    """

    inputs: Tensor
    targets: Tensor


def read_tokens() -> Tensor:
    """The whole text as int64 token numbers, one dim."""
    tokens: list[int] = []
    for name in sorted(topics):
        tokens.extend(topics[name].encode())
        tokens.append(END_OF_TOPIC)
    return torch.tensor(tokens)


def global_batch(
    tokens: Tensor, *, seed: int, step: int, num_sequences: int, seq_len: int
) -> Batch:
    """The batch that all ranks together see in one step."""
    starts = np.random.default_rng((seed, step)).integers(
        0, len(tokens) - seq_len, size=num_sequences
    )
    windows = torch.stack([tokens[start : start + seq_len + 1] for start in starts.tolist()])
    return Batch(windows[:, :-1], windows[:, 1:])


def slice_of(batch: Batch, part: int, num_parts: int) -> Batch:
    """One of `num_parts` equal slices of a batch.

    Raises:
        ValueError: If the sequences do not divide evenly. Slices of different sizes would make
            the mean over ranks differ from the mean over the batch.
    """
    num_sequences = len(batch.inputs)
    if num_sequences % num_parts:
        raise ValueError(f"{num_sequences} sequences do not cut into {num_parts} equal slices")
    size = num_sequences // num_parts
    rows = slice(part * size, (part + 1) * size)
    return Batch(batch.inputs[rows], batch.targets[rows])
