"""Parsing and planning transformations for large models: no data, the real planner.

A mixture-of-experts model of many layers and experts, three weights an expert, and three optimizer
states a weight in PyTorch's names, is renamed, transposed and fused. Three rule files do it:

- `placeholders`: a few statements with `$LAYER_ID` and `$EXPERT_ID`, expert by expert;
- `grouped`: a few statements with `$LAYER_ID` and `*`, which stack the experts of a layer;
- `written out`: every statement in full, as a program might generate it.

Four programs only rename, layer and expert, by a prefix, a prefix of all names, a regular
expression, and a dict of all parameters; optimizer states follow.

Measured in one process, in processor time: parsing, resolving (expanding macros, checking every
shape and dtype, matching targets and their optimizer states), and finding the regions for one rank
of eight that holds an eighth of every target. Also what a column-sharded target of a fused,
transposed source reads, in bytes of source per byte of target.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.report import print_table, write_json
from remesh import Transform
from remesh.core.geometry import Box
from remesh.transform import Program, Region, Resolved, TensorInfo

HIDDEN, INTERMEDIATE = 1024, 256
NUM_RANKS = 8
STATES = ("exp_avg", "exp_avg_sq", "master_weight")
ITEMSIZE = {"bfloat16": 2, "float32": 4}
WEIGHTS = {
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}

Infos = dict[str, TensorInfo]


@dataclass(frozen=True)
class Rules:
    """A program and the targets that it is for."""

    name: str
    program: Program
    targets: Infos


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.process_time()
    result = action()
    return time.process_time() - started, result


def with_states(names: dict[str, tuple[int, ...]]) -> Infos:
    """Weights in bfloat16 and their optimizer states in float32."""
    infos = {}
    for name, shape in names.items():
        infos[f"model.{name}"] = TensorInfo("bfloat16", shape)
        for slot in STATES:
            infos[f"optimizer.state.{name}.{slot}"] = TensorInfo("float32", shape)
    return infos


def sources(num_layers: int, num_experts: int) -> Infos:
    return with_states(
        {
            f"layers.{layer}.mlp.experts.{expert}.{weight}_proj.weight": shape
            for layer in range(num_layers)
            for expert in range(num_experts)
            for weight, shape in WEIGHTS.items()
        }
    )


def by_expert(left: str, right: str) -> list[str]:
    """Statements for one expert: gate and up transposed and fused, down transposed."""
    return [
        f"{left}.gate_proj.weight^T, {left}.up_proj.weight^T -> {right}.gate_up.weight, axis=1",
        f"{left}.down_proj.weight^T -> {right}.down.weight",
    ]


def rule_files(num_layers: int, num_experts: int) -> list[Rules]:
    old, new = "model.layers.{}.mlp.experts.{}", "model.decoder.{}.expert.{}"
    any_expert = "$LAYER_ID", "$EXPERT_ID"
    pairs = [(layer, expert) for layer in range(num_layers) for expert in range(num_experts)]
    expert_targets = with_states(
        {
            f"decoder.{layer}.expert.{expert}.{weight}.weight": shape
            for layer, expert in pairs
            for weight, shape in {
                "gate_up": (HIDDEN, 2 * INTERMEDIATE),
                "down": (INTERMEDIATE, HIDDEN),
            }.items()
        }
    )
    layer = "model.layers.$LAYER_ID.mlp.experts"
    grouped = [
        f"{layer}.$EXPERT_ID.{weight}_proj.weight^T -> {layer}.$EXPERT_ID.{weight}_proj.turned"
        for weight in WEIGHTS
    ] + [
        f"{layer}.*.{weight}_proj.turned -> model.decoder.$LAYER_ID.{weight}.weight, stack=0"
        for weight in WEIGHTS
    ]
    grouped_targets = with_states(
        {
            f"decoder.{number}.{weight}.weight": (num_experts, shape[1], shape[0])
            for number in range(num_layers)
            for weight, shape in WEIGHTS.items()
        }
    )
    written = [line for pair in pairs for line in by_expert(old.format(*pair), new.format(*pair))]
    return [
        Rules(
            "placeholders",
            "\n".join(by_expert(old.format(*any_expert), new.format(*any_expert))),
            expert_targets,
        ),
        Rules("grouped", "\n".join(grouped), grouped_targets),
        Rules("written out", "\n".join(written), expert_targets),
    ]


def renames(found: Infos) -> list[Rules]:
    """Programs that rename all weights, and targets of the new names."""
    pattern = re.compile(r"layers\.(\d+)\.mlp\.experts\.(\d+)")
    weights = {name: pattern.sub(r"decoder.\1.expert.\2", name) for name in found}
    prefixes = {"model.": "net.", "optimizer.": "optim."}

    def targets(rename: Callable[[str], str]) -> Infos:
        return {rename(name): info for name, info in found.items()}

    def without_prefixes(name: str) -> str:
        old = next(filter(name.startswith, prefixes))
        return prefixes[old] + name.removeprefix(old)

    decoder = targets(lambda name: name.replace("layers.", "decoder."))
    by_name = {name: new for name, new in weights.items() if name.startswith("model.")}
    return [
        Rules("prefix", {"model.layers.": "model.decoder."}, decoder),
        Rules("prefix of all", prefixes, targets(without_prefixes)),
        Rules(
            "regular expression",
            lambda name: pattern.sub(r"decoder.\1.expert.\2", name),
            targets(weights.__getitem__),
        ),
        Rules("dict", by_name, targets(weights.__getitem__)),
    ]


def regions_of_rank(resolved: Resolved, targets: Infos) -> int:
    """Regions of one rank that holds an eighth of every target, cut along its last axis."""
    num_regions = 0
    for name, info in targets.items():
        *outer, extent = info.shape
        part = extent // NUM_RANKS
        box = Box((0,) * len(outer) + (3 * part,), (*outer, part))
        num_regions += len(resolved.regions(name, box))
    return num_regions


def measure(rules: Rules, found: Infos) -> dict[str, float]:
    parse_seconds, transform = timed(lambda: Transform(rules.program))
    resolve_seconds, resolved = timed(lambda: transform.resolve(found, rules.targets))
    resolved.check()
    region_seconds, num_regions = timed(lambda: regions_of_rank(resolved, rules.targets))
    return {
        "text_bytes": len(str(rules.program)),
        "num_sources": len(found),
        "num_targets": len(rules.targets),
        "num_regions": num_regions,
        "parse_seconds": parse_seconds,
        "resolve_seconds": resolve_seconds,
        "region_seconds": region_seconds,
    }


def num_runs(region: Region, shape: tuple[int, ...]) -> int:
    """Contiguous byte ranges of a region's box in a row-major source."""
    box = region.source_box
    axis = box.ndim - 1
    while axis > 0 and box.shape[axis] == shape[axis]:
        axis -= 1
    return math.prod(box.shape[:axis])


def read_ratio(axis: int) -> dict[str, float]:
    """What one rank of eight reads for a target made of q, k and v, transposed and fused."""
    found = {
        "q": TensorInfo("bfloat16", (4096, 4096)),
        "k": TensorInfo("bfloat16", (1024, 4096)),
        "v": TensorInfo("bfloat16", (1024, 4096)),
    }
    target = {"qkv": TensorInfo("bfloat16", (4096, 6144))}
    text = """
        q^T -> qt   k^T -> kt   v^T -> vt
        qt, kt, vt -> qkv, fused_qkv, num_heads=32, num_key_value_groups=8
    """
    resolved = Transform(text).resolve(found, target)
    extents = list(target["qkv"].shape)
    extents[axis] //= NUM_RANKS
    offset = [0, 0]
    offset[axis] = 3 * extents[axis]
    box = Box(tuple(offset), tuple(extents))
    regions = resolved.regions("qkv", box)
    read = sum(region.source_box.size * ITEMSIZE["bfloat16"] for region in regions)
    return {
        "axis": axis,
        "num_regions": len(regions),
        "num_runs": sum(num_runs(region, found[region.source].shape) for region in regions),
        "bytes_read": read,
        "bytes_needed": box.size * ITEMSIZE["bfloat16"],
        "ratio": read / (box.size * ITEMSIZE["bfloat16"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--experts", type=int, default=256)
    options = parser.parse_args()
    found = sources(options.layers, options.experts)
    programs = [*rule_files(options.layers, options.experts), *renames(found)]
    results = {rules.name: measure(rules, found) for rules in programs}
    print_table(
        f"{options.layers} layers x {options.experts} experts x 3 weights x 4 states",
        ["rules", "text", "sources", "targets", "parse", "resolve", "regions of a rank"],
        [
            [
                name,
                f"{row['text_bytes'] / 1e6:.2f} MB",
                f"{row['num_sources']:,}",
                f"{row['num_targets']:,}",
                f"{row['parse_seconds']:.2f} s",
                f"{row['resolve_seconds']:.2f} s",
                f"{row['num_regions']:,} in {row['region_seconds']:.2f} s",
            ]
            for name, row in results.items()
        ],
    )
    ratios = [read_ratio(axis) for axis in (0, 1)]
    print_table(
        "One rank of eight, target of fused and transposed q, k, v",
        ["cut along", "regions", "byte ranges", "read", "needed", "read / needed"],
        [
            [
                f"axis {row['axis']}",
                str(row["num_regions"]),
                f"{row['num_runs']:,}",
                f"{row['bytes_read']:,}",
                f"{row['bytes_needed']:,}",
                f"{row['ratio']:.3f}",
            ]
            for row in ratios
        ],
    )
    write_json("transform_planning", {"planning": results, "reading": ratios})


if __name__ == "__main__":
    main()
