"""Checkpoints that DeepSpeed wrote on two ranks (`tests/data/deepspeed/make.py`), read in place.

That they load into other layouts and train on is in `tests/matrix`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import remesh
from remesh.checkpoint import convert
from remesh.cli import cli
from remesh.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    MismatchError,
    StateError,
)
from tests.data.deepspeed.make import KINDS, Rich
from tests.matrix.model import Model, optimizer_of

DATA = Path(__file__).parents[1] / "data" / "deepspeed"
STATE = "zero/optimizer_state.pt"
ALL = (*KINDS, "universal", "universal3")


@pytest.fixture(scope="module")
def expected() -> Any:
    return torch.load(DATA / "expected.pt")


def folder(name: str) -> Path:
    """The folder itself, which `latest` beside it names."""
    return next(path for path in (DATA / name).iterdir() if path.is_dir())


@pytest.mark.parametrize("name", ALL)
def test_parameters_and_moments(name: str, expected: Any) -> None:
    found = remesh.Checkpoint(folder(name))
    assert found.format == "deepspeed"
    for key, tensor in expected[name]["state"].items():
        parameter, _, kind = key.partition("/")
        stored = f"optimizer.state.{parameter}.{kind}" if kind else f"model.{parameter}"
        assert torch.equal(found[stored], tensor), stored
        assert float(found[f"optimizer.state.{parameter}.step"]) == 2
    assert found.values["epoch"] == 1
    assert found.values["global_steps"] == 2
    decay = [
        found.values[f"optimizer.param_groups.{number}.weight_decay"]
        for number in range(len(expected[name]["groups"]))
    ]
    assert decay == expected[name]["groups"]
    assert found.verify().ok


def test_the_folder_that_latest_names() -> None:
    assert [*remesh.Checkpoint(DATA / "zero1")] == [*remesh.Checkpoint(folder("zero1"))]


@pytest.mark.parametrize("name", ["rich2", "rich3"])
def test_tied_and_frozen_parameters_and_buffers(name: str) -> None:
    model, fresh = Rich(), Rich()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(3)
    remesh.load({"model": model}, DATA / name)
    assert torch.equal(model.frozen.weight, fresh.frozen.weight)
    assert torch.equal(model.frozen.bias, fresh.frozen.bias)
    assert model.norm.num_batches_tracked == 2
    assert model.norm.running_mean is not None
    assert model.norm.running_mean.any()
    assert model.head.weight is model.embed.weight
    found = remesh.Checkpoint(DATA / name)
    assert torch.equal(found["model.head.weight"], found["model.embed.weight"])


def test_a_tied_parameter_is_named_by_any_of_its_names(tmp_path: Path) -> None:
    for path in copied("rich2", tmp_path).glob("*model_states.pt"):
        content = torch.load(path, weights_only=False)
        content["shared_params"]["third.weight"] = "head.weight"
        torch.save(content, path)
    found = remesh.Checkpoint(tmp_path).index.aliases
    assert found == dict.fromkeys(["model.head.weight", "model.third.weight"], "model.embed.weight")


def test_steps_of_groups_load_into_optimizers_of_torch(tmp_path: Path) -> None:
    """DeepSpeed's own optimizers count in numbers, in the state or in the group."""
    for path in copied("universal", tmp_path).glob("zero/*/step.pt"):
        path.unlink()
    groups: list[dict[str, Any]] = [{"params": [number], "step": 9} for number in range(2)]
    for name, value in remesh.Checkpoint(folder("universal")).values.items():
        if name.startswith("optimizer.param_groups."):
            number, option = name.split(".")[2:]
            groups[int(number)].setdefault(option, value)
    torch.save({"param_groups": groups}, tmp_path / STATE)
    model = Model()
    optimizer = optimizer_of(model)
    remesh.load({"model": model, "optimizer": optimizer}, tmp_path)
    assert all(state["step"] == 9 for state in optimizer.state.values())


@pytest.mark.parametrize("num_numbers", [1, None])
def test_steps_that_are_numbers_are_tensors(tmp_path: Path, num_numbers: int | None) -> None:
    """As torch's own state dicts of optimizers have them, also beside steps that are tensors."""
    paths = sorted(copied("universal", tmp_path).glob("zero/*/step.pt"))
    for path in paths[:num_numbers]:
        torch.save(7, path)
    found = remesh.Checkpoint(tmp_path)
    number = f"optimizer.state.{paths[0].parent.name}.step"
    assert {(found[name].dtype, found[name].shape) for name in found if name.endswith(".step")} == {
        (torch.float32, ())
    }
    assert found[number] == 7
    assert found.verify().ok
    steps = {paths[0].parent.name: {"step": torch.tensor(1.0)}}
    assert number in remesh.load({"optimizer": {"state": steps}}, tmp_path).restored
    assert steps[paths[0].parent.name]["step"] == 7
    for target, rule in (("new", f"{number} -> optimizer.state.new.step"), ("other", None)):
        new = {target: {"step": torch.tensor(1.0)}}
        state = {"optimizer": {"state": new}, "own": 5}
        program = f"{rule or '_ -> optimizer.state.other.step'}\n_ -> own"
        report = remesh.load(state, tmp_path, transform=remesh.Transform(program))
        assert new[target]["step"] == (7 if rule else 1)
        assert ("optimizer.state.other.step" in report.kept) == (rule is None)
        assert "own" in report.kept
    with pytest.raises(MismatchError, match="absent"):
        remesh.load({**state, "absent": 5}, tmp_path, transform=remesh.Transform(program))
    convert(tmp_path, tmp_path / "native", format="remesh")
    assert remesh.Checkpoint(tmp_path / "native")[number] == 7


class CountingInNumbers(torch.optim.Optimizer):
    """Counts its steps as DeepSpeed's own optimizers do."""

    def step(self, closure: Any = None) -> Any:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] = {"step": 1, **moments}


def test_an_optimizer_that_counts_in_numbers_goes_on_in_numbers(tmp_path: Path) -> None:
    for path in copied("universal", tmp_path).glob("zero/*/step.pt"):
        torch.save(7, path)
    model = Model()
    groups = [{"params": group["params"]} for group in optimizer_of(model).param_groups]
    optimizer = CountingInNumbers(groups, {"lr": 1.0})
    optimizer.step()
    remesh.load({"model": model, "optimizer": optimizer}, tmp_path)
    steps = [state["step"] for state in optimizer.state.values()]
    assert set(map(type, steps)) == {int}
    assert set(steps) == {7}


@pytest.mark.parametrize("count", [10**400, 2**24 + 1, 7.3])
def test_a_step_that_no_element_can_hold_stays_a_value(tmp_path: Path, count: float) -> None:
    path = min(copied("universal", tmp_path).glob("zero/*/step.pt"))
    torch.save(count, path)
    name = f"optimizer.state.{path.parent.name}.step"
    assert remesh.Checkpoint(tmp_path).values[name] == count


def copied(name: str, target: Path) -> Path:
    shutil.copytree(folder(name), target, dirs_exist_ok=True)
    return target


def test_an_elastic_checkpoint_has_its_step_beside_the_states(tmp_path: Path) -> None:
    before = remesh.Checkpoint(folder("zero2"))
    for path in copied("zero2", tmp_path).glob("*_optim_states.pt"):
        stored = remesh.Checkpoint(path).state()["optimizer_state_dict"]
        kept = {key: stored[key] for key in ("single_partition_of_fp32_groups", "partition_count")}
        states = [dict(one) for one in stored["base_optimizer_state"]["state"].values()]
        for state in states:
            del state["step"]
        kept |= {"base_optimizer_state": states, "base_optimizer_state_step": 9}
        torch.save({"optimizer_state_dict": kept}, path)
    found = remesh.Checkpoint(tmp_path)
    names = [name for name in before if name.startswith("optimizer.state.")]
    assert any(name.endswith(".exp_avg") for name in names)
    for name in names:
        expected = torch.tensor(9.0) if name.endswith(".step") else before[name]
        assert torch.equal(found[name], expected), name


def test_tensor_parallel_parts_have_names_of_their_own(tmp_path: Path) -> None:
    for path in copied("zero1", tmp_path).iterdir():
        shutil.copy(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    found = remesh.Checkpoint(tmp_path)
    assert found["mp_rank_00.model.net.0.weight"].shape == (6, 4)
    assert found["mp_rank_01.optimizer.state.net.0.weight.exp_avg"].shape == (6, 4)


def test_a_missing_rank(tmp_path: Path) -> None:
    next(copied("zero2", tmp_path).glob("*zero_pp_rank_1*")).unlink()
    with pytest.raises(CorruptCheckpointError, match="some are missing"):
        remesh.Checkpoint(tmp_path)


def test_a_folder_of_the_trainer_holds_weights_as_well(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero1", tmp_path, dirs_exist_ok=True)
    remesh.save({"net.0.weight": torch.ones(6, 4)}, tmp_path / "hf", format="huggingface")
    shutil.copy(tmp_path / "hf" / "model.safetensors", tmp_path)
    with pytest.raises(StateError, match="huggingface or deepspeed"):
        remesh.Checkpoint(tmp_path)
    found = remesh.Checkpoint(tmp_path, format="deepspeed")
    assert "optimizer.state.net.0.weight.exp_avg" in found

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, [*words, str(tmp_path)])
        return result.exit_code, result.output

    status, text = run("ls")
    assert (status, "--format" in text) == (2, True)
    assert "optimizer.state.net.0.weight.exp_avg" in run("ls", "--format", "deepspeed")[1]
    assert run("verify", "--format", "huggingface")[0] == 0
    assert run("diff", "--format", "deepspeed", str(DATA / "zero1"))[0] == 0
    to_native = ["--format", "remesh", "--source-format", "huggingface"]
    arguments = ["convert", *to_native, str(tmp_path), str(tmp_path / "native")]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert [*remesh.Checkpoint(tmp_path / "native")] == ["net.0.weight"]


def test_latest_that_names_nothing(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero1", tmp_path, dirs_exist_ok=True)
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(CorruptCheckpointError, match="global_step7"):
        remesh.Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pipe0", "pipe1", "moe0", "moe2"])
def test_pipeline_stages_and_experts(name: str) -> None:
    found = remesh.Checkpoint(DATA / name)
    expected = torch.load(DATA / "parallel.pt")[name]
    assert len(expected) == {"pipe0": 4, "pipe1": 12}.get(name, 13)
    for key, tensor in expected.items():
        parameter, _, kind = key.partition("/")
        stored = f"optimizer.state.{parameter}.{kind}" if kind else f"model.{parameter}"
        assert torch.equal(found[stored], tensor), stored
    weights = {key for key in expected if "/" not in key}
    assert {n.removeprefix("model.") for n in found if n.startswith("model.")} == weights
    assert found.values["epoch"] == 1
    groups = [names for key, names in found.lists.items() if key.endswith("params")]
    if name in {"pipe1", "moe2"}:
        assert {one for names in groups for one in names} == weights
        assert all(float(found[f"optimizer.state.{one}.step"]) == 2 for one in weights)
    else:
        rank = "mp_rank_01" if name == "pipe0" else "expp_rank_1"
        assert f"{rank}.optimizer.state.0.exp_avg" in found


def test_moments_of_experts() -> None:
    """Each rank has those of its experts, flattened."""
    found = remesh.Checkpoint(DATA / "moe2")
    prefix = "optimizer.state.moe.deepspeed_moe.experts.deepspeed_experts."
    for rank in range(2):
        (file,) = folder("moe2").glob(f"zero_pp_rank_{rank}_*")
        first = remesh.Checkpoint(file).index
        flat = "optimizer_state_dict.base_optimizer_state.state.1.exp_avg"
        assert first[flat].shape == (84,)
        own = [
            found[f"{prefix}{2 * rank + local}.{name}.exp_avg"].flatten()
            for local in range(2)
            for name in ("weight", "bias")
        ]
        assert torch.equal(torch.cat(own), remesh.Checkpoint(file)[flat])


def test_stages_that_are_cut_by_tensor_parallelism_are_refused(tmp_path: Path) -> None:
    layer = copied("pipe0", tmp_path) / "layer_00-model_states.pt"
    for number in range(2):
        shutil.copy(layer, tmp_path / f"layer_00-model_{number:02d}-model_states.pt")
    with pytest.raises(FormatVersionError, match="universal"):
        remesh.Checkpoint(tmp_path)
