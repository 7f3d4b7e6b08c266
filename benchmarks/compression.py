"""Compressed checkpoints: what they save, what they cost, and where they pay.

A small transformer is really trained, on the text that ships with Python, in float32 by AdamW; the
state that is saved is what such a run keeps: bfloat16 weights, float32 masters, two moments.
Random numbers would say nothing, for neither their exponents nor their zeros are those of a model.

* `kinds`: how small each part of the state gets, beside zstd without byte planes, and how fast a
  thread encodes and decodes it. The limit of a thread is a plain copy.
* `systems`: bytes and CPU seconds of a save to the local disk, beside DCP with its `ZStandard`.
* `links`: saves to and loads from a storage whose link has a fixed rate, shared by all requests, as
  multiples of the time that the bytes of the state take on that link.

Contestants take turns within each round; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from torch import nn
from torch.distributed.checkpoint._extension import ZStandard  # it has no public name
from torch.nn import functional

import remesh
from benchmarks.report import median, print_table, write_json
from remesh.core.compression import decode_block, encode_block
from remesh.core.integrity import BLOCK_SIZE
from remesh.events import Event
from remesh.storage import Buffer, MemoryStorage, StorageView, Writer

WORDS, WIDTH, LAYERS, CONTEXT, BATCH = 4096, 256, 6, 64, 8
LINKS = (50e6, 200e6, 1000e6)
"""Bytes a second."""


# ----- a trained model -----


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See `nn.Module`."""
        heads = self.attention(self.before(x)).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).flatten(-2))
        mixed: torch.Tensor = self.down(functional.gelu(self.up(self.between(x))))
        return x + mixed


class Model(nn.Module):
    """A small language model over the words that occur most often."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """See `nn.Module`."""
        x = self.embedding(words) + self.places(torch.arange(words.shape[1]))
        found: torch.Tensor = self.head(self.last(self.layers(x)))
        return found


def text() -> torch.Tensor:
    """The words of Python's help texts, as numbers; all that are rare are one."""
    words = " ".join(pydoc_data.topics.topics.values()).split()
    numbers = {word: n for n, (word, _) in enumerate(Counter(words).most_common(WORDS - 1), 1)}
    return torch.tensor([numbers.get(word, 0) for word in words])


def trained(steps: int) -> tuple[dict[str, dict[str, torch.Tensor]], list[float]]:
    """Parts of the state after so many steps, and the loss at the begin and at the end."""
    torch.manual_seed(0)
    model, words = Model(), text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(words) - CONTEXT - 1, (BATCH, 1))
        rows = words[starts + torch.arange(CONTEXT + 1)]
        loss = functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    named = dict(model.named_parameters())
    parts: dict[str, dict[str, torch.Tensor]] = {
        "bfloat16 weights": {name: one.detach().bfloat16() for name, one in named.items()},
        "float32 masters": {name: one.detach() for name, one in named.items()},
    }
    for key in ("exp_avg", "exp_avg_sq"):
        parts[f"float32 {key}"] = {name: optimizer.state[one][key] for name, one in named.items()}
    return parts, [sum(one) / len(one) for one in (losses[:20], losses[-20:])]


# ----- kinds -----


@dataclass
class Kind:
    """A part of the state, cut in blocks, and what was measured of it."""

    blocks: list[Buffer]
    num_planes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(len(block) for block in self.blocks)

    def measure(self, rounds: int) -> dict[str, Any]:
        """How small it gets, and how fast."""
        stored = [encode_block(block, self.num_planes) for block in self.blocks]
        target = np.empty(BLOCK_SIZE, np.uint8)
        seconds: dict[str, list[float]] = {"copy": [], "encode": [], "decode": []}

        def decode() -> None:
            for one, block in zip(stored, self.blocks, strict=True):
                assert decode_block(one, target[: len(block)], "a block")

        def copy() -> None:
            for block in self.blocks:
                target[: len(block)] = block

        def encode() -> None:
            for block in self.blocks:
                encode_block(block, self.num_planes)

        for _ in range(rounds):
            for work in (copy, encode, decode):
                started = time.thread_time()
                work()
                seconds[work.__name__].append(time.thread_time() - started)
        rates = {name: self.num_bytes / median(found) for name, found in seconds.items()}
        plain = zstandard.ZstdCompressor()
        return {
            "num_bytes": self.num_bytes,
            "ratio": sum(map(len, stored)) / self.num_bytes,
            "ratio_without_planes": sum(len(plain.compress(one.data)) for one in self.blocks)
            / self.num_bytes,
            "bytes_per_second": rates,
        }


def kind_of(tensors: dict[str, torch.Tensor]) -> Kind:
    data = b"".join(
        one.contiguous().view(torch.uint8).numpy().tobytes() for one in tensors.values()
    )
    whole = np.frombuffer(data, np.uint8)
    itemsize = next(iter(tensors.values())).itemsize
    return Kind([whole[at : at + BLOCK_SIZE] for at in range(0, len(whole), BLOCK_SIZE)], itemsize)


# ----- systems -----


def systems(state: dict[str, Any], folder: Path, rounds: int) -> list[dict[str, Any]]:
    def by_dcp(place: Path, extensions: list[Any]) -> None:
        writer = dcp.FileSystemWriter(place, single_file_per_rank=True, _extensions=extensions)
        dcp.save(state, storage_writer=writer, no_dist=True)

    contestants: dict[str, Callable[[Path], object]] = {
        "remesh": lambda place: remesh.save(state, place),
        "remesh, compressed": lambda place: remesh.save(state, place, compress="zstd"),
        "torch DCP": lambda place: by_dcp(place, []),
        "torch DCP, ZStandard": lambda place: by_dcp(place, [ZStandard()]),
    }
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in contestants}
    for number in range(-1, rounds):  # the first is a warm-up
        for name, save in contestants.items():
            place = folder / f"{name} {number}"
            cpu, started = time.process_time(), time.perf_counter()
            save(place)
            taken = time.perf_counter() - started, time.process_time() - cpu
            size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
            if number >= 0:
                found[name].append((*taken, size))
            shutil.rmtree(place)
    names = ("seconds", "cpu_seconds", "num_bytes")
    return [
        {"contestant": name}
        | {key: median([one[at] for one in runs]) for at, key in enumerate(names)}
        for name, runs in found.items()
    ]


# ----- links -----


class Link:
    """A link of a fixed rate: one transfer after the other takes its time on it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._free_at = rate, threading.Lock(), 0.0
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Wait for as long as some bytes take, and those that were asked for before."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self._rate
            self.num_bytes += num_bytes
            waits = self._free_at - time.perf_counter()
        time.sleep(max(waits, 0.0))


class FarWriter:
    """A writer behind a link."""

    def __init__(self, inner: Writer, link: Link) -> None:
        self._inner, self._link = inner, link
        self.finish, self.abort = inner.finish, inner.abort

    def write(self, position: int, data: Buffer) -> None:
        """See `remesh.storage.Writer`."""
        self._link.take(data.size)
        self._inner.write(position, data)


class FarStorage(StorageView):
    """A storage in memory behind a link."""

    def __init__(self, name: str, rate: float) -> None:
        super().__init__(MemoryStorage())
        self.link = Link(rate)
        self._name = name

    @property
    def url(self) -> str:
        """See `Storage.url`."""
        return f"far://{self._name}"

    @property
    def latency(self) -> float:
        """See `Storage.latency`."""
        return 0.0

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """See `Storage.read`."""
        data = super().read(path, start, stop)
        self.link.take(len(data))
        return data

    def read_into(self, path: str, start: int, buffer: Buffer) -> int:
        """See `Storage.read_into`."""
        num_bytes = super().read_into(path, start, buffer)
        self.link.take(num_bytes)
        return num_bytes

    def put(self, path: str, data: bytes, *, overwrite: bool) -> None:
        """See `Storage.put`."""
        self.link.take(len(data))
        super().put(path, data, overwrite=overwrite)

    def create(self, path: str, num_bytes: int, *, overwrite: bool = False) -> FarWriter:
        """See `Storage.create`."""
        return FarWriter(super().create(path, num_bytes, overwrite=overwrite), self.link)


def links(state: dict[str, Any], rounds: int) -> Iterator[dict[str, Any]]:
    num_bytes = sum(one.nbytes for part in state.values() for one in part.values())
    target = {part: {name: torch.empty_like(one) for name, one in tensors.items()}
              for part, tensors in state.items()}  # fmt: skip
    for rate in LINKS:
        found: dict[str, list[tuple[float, float, int]]] = {}
        for number in range(rounds):
            for compress in (None, "zstd"):
                storage = FarStorage(f"{rate} {number} {compress}", rate)
                stored: list[int] = []

                def hear(event: Event, stored: list[int] = stored) -> None:
                    if event.point == "save.stored":
                        stored.append(event.num_bytes)

                started = time.perf_counter()
                remesh.save(state, storage, compress=compress, on_event=hear)
                saved = time.perf_counter()
                remesh.load(target, storage)
                loaded = time.perf_counter()
                runs = found.setdefault(str(compress), [])
                runs.append((saved - started, loaded - saved, stored[0]))
        limit = num_bytes / rate
        for name, runs in found.items():
            yield {
                "bytes_per_second": rate,
                "compress": name,
                "limit_seconds": limit,
                "save": median([one[0] for one in runs]) / limit,
                "load": median([one[1] for one in runs]) / limit,
                "stored": median([one[2] for one in runs]) / num_bytes,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="of the training")
    parser.add_argument("--copies", type=int, default=3, help="of the state that is saved")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=".", help="where to write")
    arguments = parser.parse_args()
    parts, losses = trained(arguments.steps)
    torch.set_num_threads(1)
    kinds = {name: kind_of(part).measure(arguments.rounds) for name, part in parts.items()}
    state = {f"{name}, {n}": part for n in range(arguments.copies) for name, part in parts.items()}
    # Copies under other names would be ties.
    state = {name: {k: v.clone() for k, v in part.items()} for name, part in state.items()}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        of_systems = systems(state, Path(place).resolve(), arguments.rounds)
    result = {
        "steps": arguments.steps,
        "losses": losses,
        "num_bytes": sum(one.nbytes for part in state.values() for one in part.values()),
        "kinds": kinds,
        "systems": of_systems,
        "links": list(links(state, arguments.rounds)),
    }
    print_result(result)
    write_json("compression", result)


def print_result(result: dict[str, Any]) -> None:
    print_table(
        f"After {result['steps']} steps, loss {result['losses'][0]:.2f} -> "
        f"{result['losses'][1]:.2f}; GB a CPU second",
        ["part", "stored", "without planes", "encode", "decode", "copy"],
        [
            [name, f"{row['ratio']:.1%}", f"{row['ratio_without_planes']:.1%}"]
            + [f"{row['bytes_per_second'][key] / 1e9:.2f}" for key in ("encode", "decode", "copy")]
            for name, row in result["kinds"].items()
        ],
    )
    print_table(
        f"{result['num_bytes'] / 1e6:.0f} MB to the local disk",
        ["contestant", "bytes", "seconds", "CPU"],
        [
            [
                row["contestant"],
                f"{row['num_bytes'] / result['num_bytes']:.1%}",
                f"{row['seconds']:.2f}",
                f"{row['cpu_seconds']:.2f} s",
            ]
            for row in result["systems"]
        ],
    )
    print_table(
        "Multiples of the time that the bytes of the state take on a link",
        ["link", "compress", "save", "load", "stored"],
        [
            [
                f"{row['bytes_per_second'] / 1e6:.0f} MB/s",
                row["compress"],
                f"{row['save']:.2f}",
                f"{row['load']:.2f}",
                f"{row['stored']:.1%}",
            ]
            for row in result["links"]
        ],
    )


if __name__ == "__main__":
    main()
