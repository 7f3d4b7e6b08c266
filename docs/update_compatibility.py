# ruff: noqa: INP001 - a script, not a package
"""Bring docs/compatibility.md up to date: `python docs/update_compatibility.py`.

Runs every layout to every layout as `tests/conversions/test_product.py` does, which takes minutes,
and writes what it found. A test compares the page with `page_of(set())`, so it is current as long
as those tests pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "compatibility.md"

HEAD = """# Compatibility

This page shows for each pair of layouts whether a checkpoint that was saved in the first loads in
the second. `docs/update_compatibility.py` writes the page, and tests check it.

The model is a small mixture-of-experts transformer: tied embeddings, grouped-query attention with
packed projections, a router with a bias that is a buffer, an odd number of layers and one more that
predicts further ahead. Parameters are bfloat16; AdamW works on fp32 master copies.

* `=`: on every rank, parameters, master copies, both moments, step counters, buffers, the random
  number generator and the step are bit for bit equal to the slices of the whole tensors. Ranks are
  threads, and rows that FSDP2 would keep as DTensors are described by hand.
* `T`: the same, and real processes trained in the first layout and saved. They continued in the
  first layout and, after a load, in the second, with the same losses. Loaded back into the first
  layout, the state was bit for bit the same. Here each rank is a process that steps its part of
  the optimizer, rows are cut by torch's own FSDP2, and every process computes the whole model.
* `x`: the conversion failed.

The row is the layout that was saved, the column the layout that was loaded.

"""

LAYOUTS_HEAD = """
## The layouts

| layout | ranks | data | tensor | pipeline | expert | what data-parallel ranks keep |
|---|---|---|---|---|---|---|
"""

KINDS = {
    "copies": "copies of everything",
    "fsdp": "rows of everything (FSDP2)",
    "hsdp": "rows of everything, in two copies (FSDP2)",
    "zero-parameter": "copies; optimizer state of whole parameters",
    "zero-flat": "copies; slices of flattened optimizer state",
}

FAILED_HEAD = """
## Conversions in which other systems failed

Each is a test in `tests/conversions/test_acceptance.py`:

"""


def page_of(failed: set[tuple[str, str]]) -> str:
    """The page, given the pairs that failed."""
    return "".join([HEAD, *_matrix(failed), LAYOUTS_HEAD, *_layouts(), FAILED_HEAD, *_tests()])


def _matrix(failed: set[tuple[str, str]]) -> Iterator[str]:
    from tests.conversions.layouts import LAYOUTS, TRAINED, TRAINED_IF_SLOW, TRAINED_NIGHTLY

    names = [layout.name for layout in LAYOUTS]
    yield f"| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n"
    for source in names:
        cells = []
        for target in names:
            pair = (source, target)
            mark = "T" if pair in [*TRAINED, *TRAINED_IF_SLOW, *TRAINED_NIGHTLY] else "="
            cells.append("x" if pair in failed else mark)
        yield f"| **{source}** | {' | '.join(cells)} |\n"


def _layouts() -> Iterator[str]:
    from tests.conversions.layouts import LAYOUTS

    for layout in LAYOUTS:
        stages = f"{layout.pp} x {layout.chunks}" if layout.chunks > 1 else layout.pp
        yield (
            f"| {layout.name} | {layout.world_size} | {layout.data} | {layout.tp} | {stages} | "
            f"{layout.ep} | {KINDS[layout.kind]} |\n"
        )


def _tests() -> Iterator[str]:
    from tests.conversions import test_acceptance

    for name, value in vars(test_acceptance).items():
        if name == test_acceptance.test_round_trips.__name__:
            yield from (f"* {trip}\n" for trip in test_acceptance.ROUND_TRIPS)
        elif name.startswith("test_") and callable(value):
            yield f"* {name.removeprefix('test_').replace('_', ' ')}\n"


def main() -> None:
    """Run the product and write the page."""
    from tests.conversions.layouts import LAYOUTS
    from tests.conversions.test_product import check_pairs

    failed = set()
    for number, source in enumerate(LAYOUTS):
        for shift in range(len(LAYOUTS)):
            target = LAYOUTS[(number + shift) % len(LAYOUTS)]
            try:
                check_pairs(source, [shift])
            except Exception as error:  # noqa: BLE001 - whatever it was, the pair failed
                failed.add((source.name, target.name))
                sys.stderr.write(f"{source.name} to {target.name}: {error}\n")
    PAGE.write_text(page_of(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
