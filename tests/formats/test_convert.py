"""Checkpoints written in other formats without loading them, and read by what reads those."""

from __future__ import annotations

import argparse
import fractions
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import remesh
from remesh.checkpoint import convert
from remesh.cli import cli
from remesh.errors import CheckpointExistsError, CorruptCheckpointError, StateError
from remesh.events import Event
from remesh.exchange import Exchange
from remesh.maintenance.orphans import find_orphans
from remesh.sharding import Box, ShardedObject
from tests.recipes.models import logits_of, make, read_by_transformers
from tests.support import Died, run_processes_outcomes, run_ranks
from tests.support.torch_versions import needs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with a tied weight after a step of its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def assert_loads(path: Path) -> None:
    """The training state at a place is that of `trained`."""
    model, optimizer = trained()
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fresh[1].weight = fresh[0].weight
    target = torch.optim.AdamW(fresh.parameters())
    state = {"model": fresh, "optimizer": target, "step": 0, "seen": {}}
    remesh.load(state, path)
    assert (state["step"], state["seen"]) == (7, {"a": [1, (2, 3)]})
    for left, right in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(left, right)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[left][key], target.state[right][key])


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A training state in remesh's own format."""
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "step": 7, "seen": {"a": [1, (2, 3)]}}
    remesh.save(state, tmp_path / "native", metadata={"git": "abc"})
    return tmp_path / "native"


@pytest.mark.parametrize("name", ["remesh", "torch_dcp", "torch_dist", "torch_file"])
def test_a_training_state_goes_there_and_back(name: str, native: Path, tmp_path: Path) -> None:
    report = convert(native, tmp_path / name, format=name)
    assert report.source_format == "remesh"
    assert report.verified.ok
    assert_loads(tmp_path / name)
    convert(tmp_path / name, tmp_path / "back", format="remesh")
    assert_loads(tmp_path / "back")
    back = remesh.Checkpoint(tmp_path / "back")
    assert back.verify().ok
    assert dict(back.metadata) == ({"git": "abc"} if name == "remesh" else {})


def test_values_of_other_systems_may_hold_arrays_and_types(tmp_path: Path) -> None:
    rng = ("MT19937", np.arange(3, dtype=np.uint32), 7)
    state = {"w": torch.ones(2), "numpy": rng, "device": torch.device("cpu")}
    torch.save(state, tmp_path / "state.pt")
    for name in ("remesh", "torch_dcp"):
        convert(tmp_path / "state.pt", tmp_path / name, format=name)
        found = remesh.Checkpoint(tmp_path / name).values
        expected = remesh.Checkpoint(tmp_path / "state.pt").values
        assert sorted(map(repr, found.items())) == sorted(map(repr, expected.items()))
        assert found["device"] == torch.device("cpu")


def test_sharded_tensors_and_objects_become_whole_arrays(tmp_path: Path) -> None:
    whole = np.arange(999 * 1200, dtype=np.float32).reshape(999, 1200)

    def save(exchange: Exchange) -> None:
        columns = np.ascontiguousarray(whole[:, exchange.rank * 400 :][:, :400])
        state = {
            "w": remesh.ShardedTensor.at_offset(
                "w", columns, whole.shape, (0, exchange.rank * 400)
            ),
            "rng": ShardedObject("rng", {"seed": exchange.rank}, (3,), (exchange.rank,)),
            "scalar": np.array(3.0),
            "empty": np.zeros((0, 2)),
        }
        remesh.save(state, tmp_path / "sharded", group=exchange)

    run_ranks(3, save)
    for name in ("remesh", "torch_dist"):
        convert(tmp_path / "sharded", tmp_path / name, format=name)
        found = remesh.Checkpoint(tmp_path / name)
        assert np.array_equal(found["w"], whole)
        assert found["scalar"] == 3
        assert found["empty"].shape == (0, 2)
        assert len(found.tensor("w").shape) == 2
        assert found.objects == remesh.Checkpoint(tmp_path / "sharded").objects


def test_weights_alone_for_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = make("tied Llama", 0)
    remesh.save({"model": model, "step": 7}, tmp_path / "native")
    (tmp_path / "names.json").write_text('{"model.": "", "": null}')
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    places = [str(tmp_path / name) for name in ("native", "hf", "names.json", "config.json")]
    arguments = [*places[:2], "--format", "huggingface", "--transform", places[2], "--json"]
    result = CliRunner().invoke(cli, ["convert", *arguments, "--metadata", places[3]])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["num_values"] == 0
    theirs = read_by_transformers(tmp_path / "hf")
    assert torch.equal(logits_of(theirs), logits_of(model))


def test_statements_fuse_and_cast(tmp_path: Path) -> None:
    remesh.save({"q": torch.ones(2, 3), "k": torch.zeros(2, 3), "b": torch.rand(5)}, tmp_path / "a")
    program = "q^T, k^T -> qk, axis=1\nb -> b, dtype=bfloat16"
    convert(tmp_path / "a", tmp_path / "b", format="safetensors", transform=program)
    expected = remesh.Checkpoint(tmp_path / "a")
    found = load_file(tmp_path / "b/model.safetensors")
    assert torch.equal(found["qk"], torch.cat([torch.ones(3, 2), torch.zeros(3, 2)], 1))
    assert torch.equal(found["b"], expected["b"].bfloat16())
    assert found.keys() == {"qk", "b"}


@pytest.mark.parametrize("transform", [{"a": "b"}, {"a": "b", "c.": "d."}, "a -> b"])
def test_what_a_transformation_replaces_is_named(
    transform: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(2), "c": {"x": torch.rand(2)}, "step": 7}
    remesh.save(state, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=transform)
    assert remesh.Checkpoint(tmp_path / "b")["b"].tolist() == [1, 1]
    [warning] = caplog.records
    assert warning.message.splitlines()[0] == "the transformation leaves out b"


def test_what_is_fused_for_the_ranks_of_the_source_is_taken_apart(tmp_path: Path) -> None:
    def one(exchange: Exchange) -> None:
        part = torch.arange(4.0) + 4 * exchange.rank
        shard = remesh.ShardedTensor.at_offset("w", part, (8,), (4 * exchange.rank,))
        remesh.save({"w": shard}, tmp_path / "a", group=exchange)

    run_ranks(2, one)
    program = "w -> gate, up, fused_ffn, axis=0"
    convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=program)
    found = remesh.Checkpoint(tmp_path / "b")
    assert found["gate"].tolist() == [0, 1, 4, 5]
    assert found["up"].tolist() == [2, 3, 6, 7]


def test_tied_tensors_are_compared_as_what_they_become(tmp_path: Path) -> None:
    a = torch.rand(2, 3)
    remesh.save({"a": a, "b": a.clone(), "c": a + 1, "d": a.bfloat16()}, tmp_path / "a")
    program = "a, {} -> w, tie   w -> w, dtype=bfloat16   {} -> _   d -> _"
    cast_first = "a -> a, dtype=bfloat16   a, d -> w, tie   b -> _   c -> _"
    for number, text in enumerate((program.format("b", "c"), cast_first)):
        convert(tmp_path / "a", tmp_path / f"b{number}", format="remesh", transform=text)
        loaded = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
        remesh.load(loaded, tmp_path / "a", transform=text)
        for found in (remesh.Checkpoint(tmp_path / f"b{number}"), loaded):
            assert torch.equal(found["w"], a.bfloat16())
    with pytest.raises(StateError, match="'c' does not hold the same values"):
        convert(tmp_path / "a", tmp_path / "c", format="remesh", transform=program.format("c", "b"))
    with pytest.raises(remesh.MismatchError, match="c must hold the same values"):
        remesh.load(loaded, tmp_path / "a", transform=program.format("c", "b"))


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("model.1.weight -> model.out   model.0.weight -> _", "out"),
        ("model.0.weight -> _", "1.weight"),
    ],
)
def test_the_state_of_a_tied_weight_follows_its_second_name(
    program: str, name: str, native: Path, tmp_path: Path
) -> None:
    convert(native, tmp_path / "new", format="remesh", transform=program)
    found = remesh.Checkpoint(tmp_path / "new")
    expected = remesh.Checkpoint(native)["optimizer.state.0.weight.exp_avg"]
    assert torch.equal(found[f"optimizer.state.{name}.exp_avg"], expected)
    assert found.lists == {"optimizer.param_groups.0.params": [name, "0.bias", "1.bias"]}


def test_a_tied_weight_stays_in_its_group_once(native: Path, tmp_path: Path) -> None:
    convert(native, tmp_path / "new", format="remesh", transform="model.0.bias -> model.b")
    found = remesh.Checkpoint(tmp_path / "new")
    assert found.lists == {"optimizer.param_groups.0.params": ["0.weight", "b", "1.bias"]}


@pytest.mark.parametrize("steps", [0, 1])
def test_copies_of_a_parameter_with_more_dots_keep_group_and_moments(
    steps: int, tmp_path: Path
) -> None:
    source = nn.ParameterDict({"norm": torch.rand(2), "x": torch.rand(2)})
    adam = torch.optim.AdamW(source.parameters(), lr=0.5)
    source["x"].grad, source["norm"].grad = torch.ones(2), torch.rand(2) if steps else None
    adam.step()
    remesh.save({"model": source, "optimizer": adam}, tmp_path / "a")
    program = "model.norm -> model.norm.weight, model.a.b.c, untie"
    convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=program)
    inner = nn.ModuleDict({"b": nn.ParameterDict({"c": torch.zeros(2)})})
    norm = nn.ParameterDict({"weight": torch.zeros(2)})
    target = nn.ModuleDict({"norm": norm, "a": inner})
    target.register_parameter("x", nn.Parameter(torch.zeros(2)))
    other = torch.optim.AdamW(target.parameters(), lr=9.0)
    remesh.load({"model": target, "optimizer": other}, tmp_path / "b")
    assert other.param_groups[0]["lr"] == 0.5
    for copy in (norm["weight"], target.get_parameter("a.b.c")):
        assert torch.equal(copy, source["norm"])
        assert bool(other.state[copy]) == bool(steps)
        if steps:
            assert torch.equal(other.state[copy]["exp_avg"], adam.state[source["norm"]]["exp_avg"])


def test_an_optimizer_and_its_parameter_get_new_names_at_once(tmp_path: Path) -> None:
    source = nn.ParameterDict({"x": torch.rand(2)})
    adam = torch.optim.AdamW(source.parameters())
    source["x"].grad = torch.rand(2)
    adam.step()
    remesh.save({"model": source, "optimizer": adam}, tmp_path / "a")

    def rename(name: str) -> str:
        return name.replace("optimizer.", "opt.").replace("model.x", "model.a.y")

    convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=rename)
    target = nn.ModuleDict({"a": nn.ParameterDict({"y": torch.zeros(2)})})
    other = torch.optim.AdamW(target.parameters())
    remesh.load({"model": target, "opt": other}, tmp_path / "b")
    [moments] = other.state.values()
    assert torch.equal(moments["exp_avg"], adam.state[source["x"]]["exp_avg"])


def test_only_some_names_are_converted(native: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"is tied to model\.0\.weight, which"):
        convert(native, tmp_path / "alone", format="remesh", only="model.1.weight")
    convert(native, tmp_path / "part", format="remesh", only=["model.1.b*", "step"])
    assert set(remesh.Checkpoint(tmp_path / "part")) == {"model.1.bias", "step"}
    with pytest.raises(StateError, match=r"no stored name fits 'net\.\*'"):
        convert(native, tmp_path / "none", format="remesh", only="net.*")
    with pytest.raises(StateError, match="only= names nothing"):
        convert(native, tmp_path / "none", format="remesh", only=[])


def test_no_tensor_is_ever_whole_in_memory(tmp_path: Path) -> None:
    size = 24 << 20
    remesh.save({"w": np.arange(size, dtype=np.int32)}, tmp_path / "large")
    tracemalloc.start()
    try:
        convert(tmp_path / "large", tmp_path / "copy", format="safetensors")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    end = remesh.Checkpoint(tmp_path / "copy").read("w", Box((size - 2,), (2,)))
    assert end.tolist() == [size - 2, size - 1]


def test_what_a_conversion_refuses(native: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"(?s)tensors alone.*convert --only"):
        convert(native, tmp_path / "weights", format="huggingface")
    with pytest.raises(StateError, match="one place"):
        convert(native, native, format="remesh", overwrite=True)
    for name, how in (("unknown", {}), ("exported pth", {}), ("exported pth", {"name": "w"})):
        with pytest.raises(StateError, match="is not known"):
            convert(native, tmp_path / "unknown", format=name, format_options=how)
    convert(native, tmp_path / "there", format="remesh")
    with pytest.raises(CheckpointExistsError):
        convert(native, tmp_path / "there", format="remesh")
    convert(native, tmp_path / "there", format="remesh", overwrite=True)


def unreadable(name: str) -> object:
    """A value of a file of torch.save that its reader does not read, by what it is."""
    if name == "subclass":
        from torchao.optim.subclass_8bit import OptimState8bit

        return OptimState8bit.zeros((16, 16))
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    values = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "conjugate": numbers.conj(),
        "parameter": torch.nn.Parameter(numbers.conj()),
        "negative": numbers.conj().imag,
        "object": fractions.Fraction(1, 3),
        "inside": argparse.Namespace(step=1, parts=[{"a": fractions.Fraction(1, 3)}]),
    }
    return values[name]


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("subclass", marks=needs("torchao")),
        *("sparse", "quantized", "conjugate", "parameter", "negative", "object", "inside"),
    ],
)
def test_what_was_not_read_is_not_left_out(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "a.pt", tmp_path / "new"
    torch.save({"w": torch.ones(2), name: unreadable(name)}, source)
    for chosen in ("remesh", "torch_dcp", "torch_file"):
        with pytest.raises(StateError, match=f"^{name}: was not read, so it cannot be converted"):
            convert(source, target, format=chosen)
        assert not target.exists() or not any(target.iterdir())
    arguments = ["convert", str(source), str(target), "--format", "remesh"]
    told = CliRunner().invoke(cli, arguments)
    assert told.exit_code == 2
    remedy = told.output.strip().rpartition(": ")[2]  # the last line says how to leave it out
    assert remedy == f'"{name}" -> _'
    assert CliRunner().invoke(cli, [*arguments, "--transform", remedy]).exit_code == 0
    assert [*remesh.Checkpoint(target)] == ["w"]
    assert not remesh.Checkpoint(target).values


def test_what_was_not_read_is_not_equal(tmp_path: Path) -> None:
    for number in (1, 2):
        torch.save({"x": fractions.Fraction(number, 3)}, tmp_path / "a.pt")
        (tmp_path / "a.pt").replace(tmp_path / f"{number}.pt")
    same = CliRunner().invoke(cli, ["diff", str(tmp_path / "1.pt"), str(tmp_path / "1.pt")])
    assert same.exit_code == 1
    assert "values that differ: 1" in same.output


def killed_after_a_chunk(exchange: Exchange, source: Path, target: Path, name: str) -> None:
    """Convert, and kill this process when a chunk is written."""

    def on_event(event: Event) -> None:
        if event.point == "save.chunk_written":
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, target, format=name, on_event=on_event)


@pytest.mark.parametrize("name", ["remesh", "huggingface", "torch_dcp"])
def test_one_that_is_killed_leaves_what_a_killed_save_leaves(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    remesh.save({"w": np.arange(3 << 20)}, source)
    (outcome,) = run_processes_outcomes(1, killed_after_a_chunk, source, target, name)
    assert isinstance(outcome, Died)
    with pytest.raises(remesh.CheckpointNotFoundError):
        remesh.Checkpoint(target)
    left = {path for path in target.rglob("*") if path.is_file()}
    convert(source, target, format=name)
    found = remesh.Checkpoint(target)
    assert np.array_equal(found["w"], np.arange(3 << 20))
    assert left
    assert all(path.exists() for path in left)
    if name == "remesh":
        (orphan,) = find_orphans(target, now=time.time() + 3600, older_than=60)
        assert (orphan.kind, orphan.kept) == ("save", "")


@pytest.mark.slow
def test_processes_of_torchrun_share_the_work(native: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [*torchrun, "-m", "remesh", "convert", str(native), str(tmp_path / "new"), "--json"]
    words += ["--format", "torch_dcp"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["format"] == "torch_dcp"
    for rank in range(2):
        assert list((tmp_path / "new").glob(f"__{rank}_*.distcp"))
    assert_loads(tmp_path / "new")


def test_tied_weights_of_a_torch_file_stay_tied(tmp_path: Path) -> None:
    """Names of one view of one storage are one tensor; other views of the storage are others."""
    shared = torch.arange(4096.0)
    torch.save(
        {
            "model": {"wte": shared, "head": shared, "rows": shared.view(64, 64)},
            "rest": [shared, shared[1:], torch.empty(0), torch.empty(0)],
        },
        tmp_path / "tied.pt",
    )
    source = remesh.Checkpoint(tmp_path / "tied.pt")
    assert dict(source.index.aliases) == {"model.head": "model.wte", "rest.0": "model.wte"}
    convert(tmp_path / "tied.pt", tmp_path / "native", format="remesh")
    found = remesh.Checkpoint(tmp_path / "native")
    assert found.index.aliases == source.index.aliases
    for name in source.index:
        assert torch.equal(found[name], source[name])
    num_bytes = sum(file.num_bytes for file in found.index.files)
    assert num_bytes < 4 * shared.nbytes  # five names of three views


@pytest.mark.parametrize("name", ["remesh", "safetensors", "torch_dist"])
def test_ranks_share_the_work(name: str, native: Path, tmp_path: Path) -> None:
    only = "model.*" if name == "safetensors" else "*"

    def one(exchange: Exchange) -> int:
        written: list[int] = []
        report = convert(
            native, tmp_path / "shared", format=name, group=exchange, only=only,
            on_event=lambda event: written.append(event.num_bytes)
            if event.point == "save.chunk_written" else None,
        )  # fmt: skip
        assert report.verified.ok
        return sum(written)

    written = run_ranks(2, one)
    assert min(written) > 0
    convert(native, tmp_path / "alone", format=name, only=only)
    found, expected = (remesh.Checkpoint(tmp_path / n) for n in ("shared", "alone"))
    assert set(found) == set(expected)
    assert dict(found.index.aliases) == dict(expected.index.aliases)
    assert all(torch.equal(found[key], expected[key]) for key in expected.index)
    if name != "safetensors":
        assert_loads(tmp_path / "shared")


def test_joined_and_deleted_parameters_leave_the_lists_of_an_optimizer(tmp_path: Path) -> None:
    model = torch.nn.ParameterDict({name: torch.ones(2, 3) for name in ("q", "k", "old", "w")})
    weights = [model[name] for name in ("w", "q", "k", "old")]
    optimizer = torch.optim.AdamW(weights)
    sum(one.sum() for one in weights).backward()
    optimizer.step()
    remesh.save({"model": model, "optimizer": optimizer}, tmp_path / "a")
    program = "model.q, model.k -> model.qk, axis=0   model.old -> _"
    convert(tmp_path / "a", tmp_path / "b", format="remesh", transform=program)
    found = remesh.Checkpoint(tmp_path / "b")
    assert found.lists == {"optimizer.param_groups.0.params": ["w", "qk"]}
    joined = torch.nn.ParameterDict({"w": torch.zeros(2, 3), "qk": torch.zeros(4, 3)})
    adam = torch.optim.AdamW([joined["w"], joined["qk"]])
    remesh.load({"model": joined, "optimizer": adam}, tmp_path / "b")
    assert adam.state[joined["qk"]]["exp_avg"].shape == (4, 3)
    two = torch.optim.AdamW([{"params": [model["q"], model["w"]]}, {"params": [model["k"]]}])
    remesh.save({"model": model, "optimizer": two}, tmp_path / "two")
    with pytest.raises(StateError, match=r"model\.k\nThe optimizer has them in different groups"):
        convert(tmp_path / "two", tmp_path / "c", format="remesh", transform=program)


def test_damage_of_the_source_is_found_on_the_way(native: Path, tmp_path: Path) -> None:
    (data,) = native.glob("data-*/00000.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        convert(native, tmp_path / "new", format="torch_dcp")
    assert not list((tmp_path / "new").glob("*"))
    arguments = ["convert", str(native), str(tmp_path / "new"), "--format", "torch_dcp"]
    assert CliRunner().invoke(cli, arguments).exit_code == 1
