"""What older versions of torch cannot do, and the tests that need it: they are skipped there.

The table in docs/explanation/versions.md has the same rows, and a test compares them.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version

LACKS: dict[str, tuple[str, str]] = {
    "gloo averages": (
        "2.10",
        "FSDP2 over gloo adds up gradients that it should average (pytorch issue 162338)",
    ),
    "strided shards": (
        "2.10",
        "uneven and packed `_StridedShard`s: `full_tensor` and torch's own checkpoints mix up rows",
    ),
    "sizes of strided shards": ("2.13", "`_StridedShard` does not say the sizes of packed shards"),
    "hugging face shards": (
        "2.10",
        "torch's writer of Hugging Face folders writes no shards of ranks side by side",
    ),
    "filtered output": (
        "2.10",
        "`remesh run` lacks `--duplicate-stdout-filters`, `--virtual-local-rank`, `--numa-binding`",
    ),
    "torchao": ("2.10", "torchao 0.18 cannot be imported"),
}
"""What is needed → the oldest torch on which it works, and what happens on older ones."""

TORCH = Version(Version(version("torch")).base_version)


def has(what: str) -> bool:
    """Whether this torch can do one of `LACKS`."""
    return Version(LACKS[what][0]) <= TORCH


def needs(what: str) -> pytest.MarkDecorator:
    """Skip a test where torch is too old for what it needs, one of `LACKS`."""
    since, reason = LACKS[what]
    return pytest.mark.skipif(not has(what), reason=f"torch before {since}: {reason}")
