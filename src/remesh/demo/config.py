"""What the demo runs: sizes, layouts and runs. Plain values, free of torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path


class Kind(enum.StrEnum):
    """How parameters are spread over ranks."""

    FSDP2 = "FSDP2"
    TENSOR_PARALLEL = "tensor parallel"
    DATA_PARALLEL = "DDP"


@dataclass(frozen=True, slots=True)
class Layout:
    """A kind of parallelism over a number of ranks."""

    kind: Kind
    num_ranks: int

    @property
    def num_data_parts(self) -> int:
        """How many slices the global batch is cut into."""
        return 1 if self.kind is Kind.TENSOR_PARALLEL else self.num_ranks

    def __str__(self) -> str:
        return f"{self.kind} x {self.num_ranks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the transformer.

    Attributes:
        vocab_size: Number of tokens.
        dim: Width of the residual stream.
        num_layers: Number of blocks.
        num_heads: Query heads; `dim` is cut evenly among them.
        num_kv_heads: Key-value heads; divides `num_heads`.
        hidden_dim: Width inside the MLP.
        max_seq_len: Longest sequence, in tokens.
        rope_base: Base of the rotary frequencies.
        norm_eps: Added to the mean square in RMSNorm.
        tied_embeddings: Whether the output layer uses the embedding's weight.

    Raises:
        ValueError: If the heads do not divide as described.
    """

    vocab_size: int = 257
    dim: int = 256
    num_layers: int = 2
    num_heads: int = 8
    num_kv_heads: int = 2
    hidden_dim: int = 640
    max_seq_len: int = 64
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"dim {self.dim} does not cut into {self.num_heads} heads of an even width"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads "
                "evenly"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What decides the sequence of losses.

    Attributes:
        model: Sizes of the model.
        num_sequences: Sequences in a global batch.
        seq_len: Tokens of a sequence.
        learning_rate: Peak learning rate.
        adam_eps: Added to the root of Adam's second moment. It is as large as for Llama 2: a
            smaller one turns the rounding of tiny gradients into visible steps.
        weight_decay: Of the matrices; norms have none.
        num_warmup_steps: Steps over which the learning rate rises.
        num_steps: Steps of a whole run; the learning rate falls to a tenth until then.
        seed: Of the initial weights and of the batches.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    num_sequences: int = 16
    seq_len: int = 48
    learning_rate: float = 1e-3
    adam_eps: float = 1e-5
    weight_decay: float = 0.1
    num_warmup_steps: int = 5
    num_steps: int = 40
    seed: int = 7

    def rate_factor(self, step: int) -> float:
        """The learning rate of a step, as a fraction of the peak: a rise, then a straight fall."""
        if step < self.num_warmup_steps:
            return (step + 1) / self.num_warmup_steps
        done = (step - self.num_warmup_steps) / (self.num_steps - self.num_warmup_steps)
        return max(1 - 0.9 * done, 0.1)


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill `rank` while it writes the checkpoint of step `step`."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One run of a job: a set of processes from their start to their end.

    Attributes:
        name: A letter, for people.
        purpose: A few words, for people.
        layout: How the model is spread, and over how many processes.
        train: What is trained.
        root: Directory of the checkpoints: the run goes on from the newest, if there is one. None
            for a run that neither loads nor saves.
        save_every: Steps from one save to the next, or None for no saves.
        kill: Which rank is killed, or None.
    """

    name: str
    purpose: str
    layout: Layout
    train: TrainConfig
    root: Path | None = None
    save_every: int | None = None
    kill: Kill | None = None
