"""Checkpoints of other systems: reading and converting them, and looking at a large one.

* `dcp`: the state of `benchmarks.save_load`, saved by `torch.distributed.checkpoint` in rows, is
  loaded into columns by remesh and by `dcp.load`.
* `huggingface`: a sharded directory of `save_pretrained` is loaded into a model of transformers
  that FSDP2 has cut: by remesh, by `dcp.load` with its `HuggingFaceStorageReader`, and by
  `from_pretrained` on rank 0, from where it is broadcast.
* `convert`: the same directory becomes native, and that becomes a directory of Hugging Face.
* `inspect`: `ls` and `diff` of a checkpoint with a million pieces, native and DCP, each in a
  process of its own.

`limit` is the same processes moving the same bytes raw, as in `benchmarks.save_load`: reading each
byte once, and for a conversion, which compares what it has written, reading, writing and reading
again. All take turns within each round, with a cold page cache; figures are medians over the
rounds. What contestants have loaded must be equal.

Beside seconds: CPU seconds of all ranks; memory of all ranks at its peak above what they had
before, mapped files included; bytes that were read, by calls and (maps included) from the disk. The
last two and the peak are relative to the bytes that were needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import remesh
from benchmarks.report import median, print_table, write_json
from benchmarks.save_load import drop_cache, local_shards, measure, raw_read, raw_write
from remesh.checkpoint import convert
from remesh.core.geometry import Box
from remesh.core.integrity import raw_digest
from remesh.elastic.script import finish
from remesh.sharding import Part

TASKS = ("dcp", "huggingface", "convert", "inspect")
Figures = dict[str, list[dict[str, float]]]
"""Contestant → what was measured in each round."""


@dataclass(frozen=True)
class Options:
    gibibytes: float
    rounds: int
    folder: str


def take_turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    folder: Path,
    local: Callable[[], list[torch.Tensor]],
) -> Figures:
    """Let each fill the local tensors in every round, and check that all fill them alike."""
    found: Figures = {name: [] for name in contestants}
    digests: dict[str, list[bytes]] = {}
    for number in range(rounds):
        for name, action in contestants.items():
            for tensor in local():
                tensor.zero_()
            dist.barrier()
            if dist.get_rank() == 0:
                drop_cache(folder)
            found[name].append(measure(action))
            if number == 0 and name != "limit":
                digests[name] = [
                    raw_digest(tensor.contiguous().view(torch.uint8).numpy().data)
                    for tensor in local()
                ]
    first, *others = digests.items()
    for name, own in others:
        assert own == first[1], f"{name} and {first[0]} have loaded different values"
    return found


def read_dcp(folder: Path, options: Options) -> Figures:
    """Load a checkpoint of DCP, saved in rows, into columns."""
    source = local_shards(options.gibibytes, 0, fill=True)
    num_bytes = sum(data.nbytes for data in source.data.values())
    dcp.save(source.dtensors(), checkpoint_id=folder / "dcp")
    del source
    raw_write(folder, num_bytes)
    target = local_shards(options.gibibytes, 1, fill=False)
    contestants = {
        "limit": lambda: raw_read(folder, num_bytes),
        "remesh": lambda: remesh.load(target.dtensors(), folder / "dcp"),
        "remesh, each for itself": lambda: remesh.load(
            target.dtensors(), folder / "dcp", share_reads=False
        ),
        "torch DCP": lambda: dcp.load(target.dtensors(), checkpoint_id=folder / "dcp"),
    }
    return take_turns(contestants, options.rounds, folder, lambda: list(target.data.values()))


def llama_config(gibibytes: float) -> Any:
    """A model whose weights in bfloat16 come to about a size."""
    import transformers

    hidden = 2048 if gibibytes >= 0.5 else 512
    config = transformers.LlamaConfig(
        vocab_size=16384,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_attention_heads=16,
        num_key_value_heads=4,
    )
    head = 2 * config.vocab_size * hidden
    layer = hidden * (hidden * 5 // 2 + 3 * config.intermediate_size)
    config.num_hidden_layers = max(round((gibibytes * 2**29 - head) / layer), 1)
    return config


def save_pretrained(folder: Path, gibibytes: float) -> None:
    """Write a sharded directory, as `save_pretrained` does. By one process alone."""
    import transformers

    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config(gibibytes)).bfloat16()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-1, 1)
    model.save_pretrained(folder, max_shard_size="400MB")


def read_huggingface(folder: Path, options: Options) -> Figures:
    """Load a directory of Hugging Face into a model that FSDP2 has cut."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    place = folder.parent / "huggingface"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama_config(options.gibibytes)).bfloat16()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")

    def local() -> list[torch.Tensor]:
        shards: Any = list(model.parameters())
        return [shard.to_local().detach() for shard in shards]

    def by_dcp() -> None:
        reader = dcp.HuggingFaceStorageReader(str(place))
        dcp.load(model.state_dict(), storage_reader=reader)

    def by_broadcast() -> None:
        whole = {}
        if dist.get_rank() == 0:
            loaded = transformers.LlamaForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
            whole = loaded.state_dict()
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=how)

    num_bytes = sum(tensor.nbytes for tensor in local())
    raw_write(folder, num_bytes)
    contestants = {
        "limit": lambda: raw_read(folder, num_bytes),
        "remesh": lambda: remesh.load(model, place),
        "torch DCP, its reader": by_dcp,
        "transformers, broadcast": by_broadcast,
    }
    found = take_turns(contestants, options.rounds, folder.parent, local)
    dist.barrier()
    return found


def convert_there_and_back(folder: Path, options: Options) -> Figures:
    """Convert a directory of Hugging Face to remesh's own format, and that to the former."""
    source, group = folder.parent / "huggingface", dist.group.WORLD
    num_bytes = remesh.Checkpoint(source).index.boxes.num_bytes.sum() // dist.get_world_size()

    def limit() -> None:
        raw_read(folder / "before", num_bytes)
        (folder / f"raw-{dist.get_rank()}").unlink(missing_ok=True)
        raw_write(folder, num_bytes)
        raw_read(folder, num_bytes)

    (folder / "before").mkdir(parents=True, exist_ok=True)
    raw_write(folder / "before", num_bytes)
    contestants = {
        "limit": limit,
        "Hugging Face to native": lambda: convert(
            source, folder / "native", format="remesh", overwrite=True, group=group
        ),
        "native to Hugging Face": lambda: convert(
            folder / "native", folder / "back", format="huggingface", overwrite=True, group=group
        ),
    }
    found: Figures = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, action in contestants.items():
            dist.barrier()
            if dist.get_rank() == 0:
                drop_cache(folder.parent)
            found[name].append(measure(action))
    if dist.get_rank() == 0:
        first, last = remesh.Checkpoint(source), remesh.Checkpoint(folder / "back")
        assert all(torch.equal(first[name], last[name]) for name in first.index)
    dist.barrier()
    return found


def save_pieces(folder: Path, num_pieces: int) -> Figures:
    """Save tensors in 64 pieces each, three times: native, with one change, and as DCP. 2 ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {}
    for number in range(num_pieces // 64):
        name = f"model.layers.{number // 100}.block.{number % 100}.weight"
        parts = tuple(
            Part(Box((row, 0), (1, 16)), np.full((1, 16), number, np.float32))
            for row in range(rank, 64, world_size)
        )
        state[name] = remesh.ShardedTensor(name, (64, 16), parts)
    remesh.save(state, folder / "native")
    remesh.save(state, folder / "dcp", format="torch_dcp")
    if rank == 0:
        state["model.layers.0.block.0.weight"].parts[0].data[0, 0] = -1
    remesh.save(state, folder / "changed")
    return {}


_LAUNCH = """
import json, os, resource, subprocess, sys, time
started = time.perf_counter()
ended = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "seconds": time.perf_counter() - started, "cpu": usage.ru_utime + usage.ru_stime,
    "peak": usage.ru_maxrss * 1024, "code": ended.returncode, "error": ended.stderr}))
"""
"""Measures a command from a small process: a large one would count as the command's peak."""


def inspect(folder: Path, rounds: int) -> Figures:
    """Look at the checkpoints of `save_pieces`."""
    native, changed, torch_dcp = (str(folder / name) for name in ("native", "changed", "dcp"))
    commands = {
        "--version": ["--version"],
        "ls": ["ls", native],
        "diff": ["diff", native, changed],
        "diff --structure": ["diff", native, changed, "--structure"],
        "ls, DCP": ["ls", torch_dcp],
        "diff, native and DCP": ["diff", native, torch_dcp],
    }
    found: Figures = {name: [] for name in commands}
    for _ in range(rounds):
        for name, words in commands.items():
            command = [sys.executable, "-c", _LAUNCH, sys.executable, "-m", "remesh", *words]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            figures = json.loads(ended.stdout)
            expected = 1 if name == "diff" else 0
            assert figures.pop("code") == expected, figures["error"]
            figures.pop("error")
            found[name].append(figures)
    return found


def run_rank(
    rank: int, world_size: int, task: str, options: Options, num_pieces: int, results: Any
) -> None:
    torch.set_num_threads(1)
    folder = Path(options.folder) / f"{task}-{world_size}"
    folder.mkdir(exist_ok=True)
    store = f"file://{options.folder}/store-{task}-{world_size}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world_size)
    if task == "inspect":
        found = save_pieces(folder, num_pieces)
    else:
        do = {"dcp": read_dcp, "huggingface": read_huggingface, "convert": convert_there_and_back}
        found = do[task](folder, options)
    if rank == 0:
        results.update(found)
    dist.barrier()
    dist.destroy_process_group()
    finish()  # without a race between gloo's threads and the end of the interpreter


def rows_of(task: str, num_bytes: int, found: Figures) -> list[dict[str, Any]]:
    """The medians of each contestant."""
    rows = []
    limit = median([one["seconds"] for one in found["limit"]])
    for name, figures in found.items():
        middle = {key: median([one[key] for one in figures]) for key in figures[0]}
        rows.append(
            {
                "task": task,
                "contestant": name,
                "times_limit": middle["seconds"] / limit,
                "bytes": num_bytes,
                **middle,
                "all_seconds": [one["seconds"] for one in figures],
            }
        )
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = [
        [
            row["task"],
            row["contestant"],
            f"{row['seconds']:.2f} s",
            f"{row['times_limit']:.2f}",
            f"{row['cpu']:.2f} s",
            *(f"{row[key] / row['bytes']:.2f}" for key in ("peak", "read", "disk")),
        ]
        for row in rows
    ]
    columns = ["", "contestant", "median", "x limit", "CPU", "peak", "read", "from disk"]
    print_table(title, columns, table)


def show_commands(rows: list[dict[str, Any]], title: str) -> None:
    table = [
        [
            row["command"],
            f"{row['seconds']:.2f} s",
            f"{row['cpu']:.2f} s",
            f"{row['peak'] / 1e6:.0f} MB",
        ]
        for row in rows
    ]
    print_table(title, ["", "median", "CPU", "peak memory"], table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="size of state and weights")
    parser.add_argument("--pieces", type=int, default=1_024_000, help="pieces to look at")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", choices=TASKS, nargs="*", default=TASKS)
    parser.add_argument("--folder", help="where to write; by default a temporary folder here")
    arguments = parser.parse_args()
    worlds = {
        "dcp": arguments.ranks,
        "huggingface": arguments.ranks,
        "convert": [1, 2],
        "inspect": [2],
    }
    result: dict[str, list[dict[str, Any]]] = {"bytes": [], "commands": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder or ".") as place:
        options = Options(arguments.gib, arguments.rounds, str(Path(place).resolve()))
        if {"huggingface", "convert"} & {*arguments.only}:
            save_pretrained(Path(place) / "huggingface", arguments.gib)
        for task in arguments.only:
            for world_size in worlds[task]:
                results = mp.Manager().dict()
                extra = (task, options, arguments.pieces, results)
                mp.spawn(run_rank, (world_size, *extra), nprocs=world_size)
                folder = Path(options.folder) / f"{task}-{world_size}"
                if task == "inspect":
                    for name, figures in inspect(folder, arguments.rounds).items():
                        middle = {key: median([one[key] for one in figures]) for key in figures[0]}
                        result["commands"].append({"command": name, **middle})
                else:
                    num_bytes = sum(file.stat().st_size for file in folder.glob("raw-*"))
                    label = f"{task}, {world_size} rank{'s' * (world_size > 1)}"
                    result["bytes"] += rows_of(label, num_bytes, dict(results))
                shutil.rmtree(folder)
                write_json("foreign", result)
    if result["bytes"]:
        show(result["bytes"], f"{arguments.gib} GiB, {arguments.rounds} rounds")
    if result["commands"]:
        show_commands(result["commands"], f"{arguments.pieces:,} pieces")


if __name__ == "__main__":
    main()
