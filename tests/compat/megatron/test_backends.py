"""Saving and loading in each backend: layouts, kinds of leaves, strictness, damage.

One process plays all ranks: it may hold any number of shards of a key.
"""

from __future__ import annotations

import argparse
import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import remesh
from remesh.compat import megatron as dist_checkpointing
from remesh.compat.megatron import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    StrictHandling,
)
from remesh.compat.megatron.serialization import load, save
from remesh.compat.megatron.strategies.base import (
    SaveShardedStrategy,
    StrategyAction,
    default_strategies,
    register_default_strategy,
)
from remesh.compat.megatron.strategies.native import RemeshSaveShardedStrategy
from remesh.compat.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from tests.compat.megatron.layouts import OwnLoad, flat_shard, flat_shards, row_shards, shard
from tests.support.zarr_files import write_zarr

BACKENDS = ["remesh", "torch_dist"]
backends = pytest.mark.parametrize("backend", BACKENDS)


@backends
@pytest.mark.parametrize(("num_saved", "num_loaded"), [(1, 4), (4, 1), (2, 8), (8, 2), (64, 4)])
def test_128_elements_saved_in_n_shards_load_in_m(
    tmp_path: Path, backend: str, num_saved: int, num_loaded: int
) -> None:
    save(row_shards(num_saved, values=True), tmp_path, (backend, 1))
    loaded = load(row_shards(num_loaded, values=False), tmp_path)
    joined = torch.cat([loaded[str(rank)] for rank in range(num_loaded)])
    assert joined.dtype == torch.float32
    assert torch.equal(joined, torch.arange(128.0))


@backends
@pytest.mark.parametrize("saved", [(2, 3), (6, 1), (1, 4)])
@pytest.mark.parametrize("loaded", [(6, 1), (2, 3), (3, 2), (1, 5)])
def test_flattened_shards_load_in_any_other_cut(
    tmp_path: Path, backend: str, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    whole = torch.arange(12).reshape(2, 6)
    save(flat_shards(whole, *saved, values=True), tmp_path, (backend, 1))
    expected = flat_shards(whole, *loaded, values=True)
    found = load(flat_shards(whole, *loaded, values=False), tmp_path)
    for rank, one in expected.items():
        if one.data.numel():
            assert torch.equal(found[rank], one.data)
        else:
            assert rank not in found
    plain = load({"all": shard("moment", torch.zeros(2, 6))}, tmp_path)
    assert torch.equal(plain["all"], whole.float())


def test_flattened_shards_have_their_shape_before_the_save_is_finalized(tmp_path: Path) -> None:
    whole = torch.arange(12).reshape(2, 6)
    shards = flat_shards(whole, 2, 3, values=True)
    request = save(shards, tmp_path, ("torch_dist", 1), async_sharded_save=True)
    assert request is not None
    request.preloaded().run()
    committed = (tmp_path / ".metadata").read_bytes()
    assert remesh.Checkpoint(tmp_path).read("moment").tolist() == whole.tolist()
    for finalize in request.finalize_fns:
        finalize()
    assert (tmp_path / ".metadata").read_bytes() == committed
    loaded = load(flat_shards(whole, 3, 2, values=False), tmp_path)
    assert torch.equal(loaded["0"], flat_shards(whole, 3, 2, values=True)["0"].data)


def test_a_flattened_range_reads_only_its_bytes(tmp_path: Path) -> None:
    whole = torch.arange(1 << 22, dtype=torch.float32).reshape(1 << 10, 1 << 12)
    save(flat_shards(whole, 2, 2, values=True), tmp_path)
    data, span = torch.zeros(1000), slice(5000, 6000)
    part = flat_shard("moment", data, tuple(whole.shape), flattened_range=span)
    report = remesh.load([part.to_remesh()], tmp_path)
    assert torch.equal(data, whole.reshape(-1)[span])
    assert report.bytes_needed == 4000
    assert report.bytes_read < whole.nbytes / 4


def leaves(*, values: bool) -> dict[str, Any]:
    """One of each kind; without values, as a state dict to load."""

    def ten(data: torch.Tensor) -> torch.Tensor:
        return data if values else torch.zeros_like(data)

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        upper, lower = data.chunk(2)
        return {
            "upper": shard(f"{key}.upper", upper, replica_id=replica_id),
            "lower": [shard(f"{key}.lower", lower)],
        }

    def merge(found: Any) -> torch.Tensor:
        return torch.cat([found["upper"], *found["lower"]])

    layers = [ten(torch.full((2, 2), float(n))) for n in range(3)]
    rng = [{"python": (3, (1, 2)), "numpy": np.arange(4), "torch": torch.arange(3)}]
    return {
        "half": shard("half", ten(torch.arange(12.0).reshape(3, 4).bfloat16())),
        "layers": [
            {"weight": shard("layers.weight", layer, (0, n, 3), prepend_axis_num=1)}
            for n, layer in enumerate(layers)
        ],
        "scalar": shard("scalar", ten(torch.tensor(7))),
        "fused": ShardedTensorFactory("fused", ten(torch.arange(8.0).reshape(4, 2)), build, merge),
        "rng": ShardedObject("rng", rng if values else None, (2,), (0,)),
        "extra": ShardedObject("extra", io.BytesIO(b"state") if values else None, (2,), (1,)),
        "none": ShardedObject("none", None, (1, 1), (0, 0)),
        "local": {"here": LocalNonpersistentObject("mine")},
        "args": argparse.Namespace(lr=1e-3, dtype=torch.bfloat16) if values else "ignored",
        "table": torch.arange(5),
        "common": {
            "step": 5,
            "nested": [{"t": torch.arange(3), "a": np.ones(2)}, (1, "x")],
            1: {"int key": None},
            "empty": {},
            "half.dotted": torch.ones(2).bfloat16(),
        },
    }


@backends
def test_every_kind_of_leaf_comes_back(tmp_path: Path, backend: str) -> None:
    saved, wanted = leaves(values=True), leaves(values=False)
    save(saved, tmp_path, (backend, 1), content_metadata={"version": 2})
    assert set(saved["fused"]) == {"upper", "lower"}  # a save puts in what factories build
    loaded = load(wanted, tmp_path)
    assert loaded["half"].flatten().tolist() == list(range(12))
    assert loaded["half"].data_ptr() == wanted["half"].data.data_ptr()
    weights = [layer["weight"] for layer in loaded["layers"]]
    assert [weight.tolist() for weight in weights] == [[[n, n], [n, n]] for n in (0.0, 1.0, 2.0)]
    assert loaded["scalar"] == 7
    assert torch.equal(loaded["fused"], torch.arange(8.0).reshape(4, 2))
    (rng,) = loaded["rng"]
    assert rng["python"] == (3, (1, 2))
    assert (rng["numpy"].tolist(), rng["torch"].tolist()) == ([0, 1, 2, 3], [0, 1, 2])
    assert loaded["none"] is None
    assert loaded["extra"].read() == b"state"
    assert loaded["local"] == {"here": "mine"}
    assert loaded["args"] == argparse.Namespace(lr=1e-3, dtype=torch.bfloat16)
    for name in ("common", "table"):
        assert str(loaded[name]) == str(leaves(values=True)[name])
    assert isinstance(wanted["fused"], ShardedTensorFactory)
    assert dist_checkpointing.load_content_metadata(tmp_path) == {"version": 2}


@backends
def test_metadata_and_plain_tensors(tmp_path: Path, backend: str) -> None:
    save(leaves(values=True), tmp_path, (backend, 1))
    tensors = dist_checkpointing.load_tensors_metadata(tmp_path)
    assert set(tensors) == {"half", "layers.weight", "scalar", "fused.upper", "fused.lower"}
    weight = tensors["layers.weight"]
    assert weight.global_shape == weight.local_shape == (3, 2, 2)
    assert (tensors["half"].dtype, tensors["half"].data) == (torch.bfloat16, None)
    everything = dist_checkpointing.load_sharded_metadata(tmp_path)
    objects = {"rng/shard_0_2", "extra/shard_1_2", "none/shard_0.0_1.1"}
    assert set(everything) == set(tensors) | objects
    assert everything["extra/shard_1_2"].global_offset == (1,)
    plain = dist_checkpointing.load_plain_tensors(tmp_path)
    assert set(plain) == set(tensors)
    assert plain["layers.weight"].shape == (3, 2, 2)
    common = dist_checkpointing.load_common_state_dict(tmp_path)
    assert set(common) == {"args", "common", "table"}


@backends
@pytest.mark.parametrize(
    ("shape", "expected"), [((4,), [0, 1, 2, 0]), ((2,), [0, 1]), ((3,), [0, 1, 2])]
)
def test_another_global_shape_is_padded_or_cut_where_it_may_differ(
    tmp_path: Path, backend: str, shape: tuple[int], expected: list[int]
) -> None:
    save({"w": shard("w", torch.arange(3))}, tmp_path, (backend, 1))
    wanted = shard("w", torch.full(shape, 9), allow_shape_mismatch=True)
    assert load({"w": wanted}, tmp_path)["w"].tolist() == expected
    strict = torch.full((5,), 9)
    with pytest.raises(CheckpointingException, match=r"shape \(3,\) is stored, \(5,\) is wanted"):
        load({"w": shard("w", strict)}, tmp_path)
    assert strict.tolist() == [9] * 5


@backends
def test_irregular_shards_with_a_hole_are_refused(tmp_path: Path, backend: str) -> None:
    def irregular(offset: int, length: int) -> ShardedTensor:
        data = torch.full((length,), offset)
        return ShardedTensor("w", data, data.dtype, (length,), (6,), (offset,), None)

    save({"a": irregular(0, 1), "b": irregular(1, 5)}, tmp_path, (backend, 1))
    whole = load({"w": shard("w", torch.zeros(6))}, tmp_path)["w"]
    assert whole.tolist() == [0, 1, 1, 1, 1, 1]
    holed = {"a": irregular(0, 1), "b": irregular(2, 4)}
    for validate in (True, False):
        with pytest.raises(CheckpointingException, match=r"no rank holds \[1:2\]"):
            save(holed, tmp_path / "new", (backend, 1), validate_access_integrity=validate)
    with pytest.raises(CheckpointingException, match=r"no rank holds \[1:6\]"):
        load({"a": irregular(0, 1)}, tmp_path)
    part = load({"a": irregular(0, 1)}, tmp_path, validate_access_integrity=False)
    assert part["a"].tolist() == [0]


BFLOAT16 = torch.zeros(2).bfloat16()


@pytest.mark.parametrize(
    ("leaves", "complaint"),
    [
        ([shard("k", BFLOAT16, replica_id=1)], "no main replica"),
        ([shard("k", BFLOAT16)] * 2, "several main replicas"),
        (
            [shard("k", BFLOAT16, (0, 0, 2)), shard("k", torch.zeros(2), (0, 1, 2))],
            "one rank describes it as",
        ),
        (
            [shard("k", BFLOAT16), ShardedObject("k", 1, (1,), (0,))],
            "a tensor on one rank and an object",
        ),
        (
            [ShardedObject("o", 1, (2,), (0,)), ShardedObject("o", 1, (3,), (1,))],
            "grids of shapes",
        ),
        ([ShardedObject("o", 1, (1,), (0,))] * 2, r"o/shard_0_1: main replica on ranks \[0, 0\]"),
    ],
)
def test_descriptions_of_one_key_must_agree(
    tmp_path: Path, leaves: list[Any], complaint: str
) -> None:
    with pytest.raises(CheckpointingException, match=complaint):
        save(dict(enumerate(leaves)), tmp_path)


@backends
@pytest.mark.parametrize("strict", [*StrictHandling, "log_all", True, False])
def test_strictness(
    tmp_path: Path, backend: str, strict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stored = {key: shard(key, torch.ones(2)) for key in "ab"}
    save({**stored, "o": ShardedObject("o", 1, (1,), (0,))}, tmp_path, (backend, 1))
    wanted: dict[str, Any] = {key: shard(key, torch.zeros(2)) for key in "ac"}
    wanted["p"] = ShardedObject("p", None, (1,), (0,))
    handling = {True: "assume_ok_unexpected", False: "log_unexpected"}.get(strict, strict)
    handling = StrictHandling(handling)
    caplog.set_level(logging.WARNING)
    caplog.clear()
    if handling.value in {"assume_ok_unexpected", "raise_unexpected", "raise_all"}:
        with pytest.raises(CheckpointingException, match="c") as caught:
            load(wanted, tmp_path, strict=strict)
        assert ("b, o" in str(caught.value)) == (handling.value == "raise_all")
        assert wanted["a"].data.tolist() == [0, 0]
        return
    result = load(wanted, tmp_path, strict=strict)
    if handling.value in {"return_unexpected", "return_all"}:
        result, missing, unexpected = result
        assert unexpected == {"c", "p"}
        assert missing == ({"b", "o"} if handling.value == "return_all" else set())
    assert {key: value.tolist() for key, value in result.items()} == {"a": [1, 1]}
    told_of_unexpected = "Unexpected keys (asked for, but not stored): c, p" in caplog.text
    assert told_of_unexpected == handling.value.startswith("log")
    assert ("not asked for by any rank): b, o" in caplog.text) == (handling.value == "log_all")


MIXED = [*(shard("w", torch.ones(2), (0, n, 2)) for n in range(2)), 5]


@pytest.mark.parametrize(
    ("saved", "wanted", "options", "message"),
    [
        ({}, {}, {"strict": "maybe"}, "strict='maybe' is none of assume_ok"),
        (
            {},
            {"fused": leaves(values=False)["fused"]},
            {"strict": "log_unexpected"},
            "nothing was loaded for the factory",
        ),
        ({"a": 1}, {"a": LocalNonpersistentObject(2)}, {}, "two values meet"),
        ({"mixed": MIXED}, {"mixed": MIXED}, {}, "use a dict"),
    ],
)
def test_what_cannot_be_put_together_is_refused(
    tmp_path: Path, saved: Any, wanted: Any, options: dict[str, Any], message: str
) -> None:
    save(saved, tmp_path)
    with pytest.raises(ValueError, match=message):
        load(wanted, tmp_path, **options)


def test_parts_of_a_factory_may_be_the_same_tensor(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica: Any, _range: object) -> list[ShardedTensor]:
        parts = (data, data, data[1:])
        return [shard(f"{key}.{n}", part, replica_id=replica) for n, part in enumerate(parts)]

    def state(start: int) -> dict[str, Any]:
        return {"w": ShardedTensorFactory("w", torch.arange(start, start + 5), build, list)}

    save(state(0), tmp_path)
    parts = load(state(10), tmp_path)["w"]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4]]


class Own:
    """A class that no unpickler of ours knows."""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"deep": [Own()]}, r"(?s)common state\.deep\.0.*Own"),
        ({"o": ShardedObject("obj", Own(), (1,), (0,))}, r"(?s)obj.*Own"),
    ],
)
def test_values_of_a_class_of_ones_own_are_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointingException, match=message):
        save(state, tmp_path)
    assert not (tmp_path / "metadata.json").exists()


def test_a_class_in_the_common_file_of_others_must_be_allowed(tmp_path: Path) -> None:
    save(state_of(1), tmp_path)
    torch.save({"own": Own(), "step": 1}, tmp_path / "common.pt")
    name = f"{__name__}.Own"
    with pytest.raises(CheckpointingException, match=rf"(?s){name}.*load it with allow="):
        load(state_of(0), tmp_path)
    loaded = load(state_of(0), tmp_path, allow=[name])
    assert (type(loaded["own"]), loaded["step"]) == (Own, 1)


# ---------------------------------------------------------------------------------------------
# Directories and their content
# ---------------------------------------------------------------------------------------------


def state_of(step: int) -> dict[str, Any]:
    return {"w": shard("w", torch.full((2,), float(step))), "step": step}


def step_in(folder: Any) -> int:
    """The step that is stored in a directory, once both its parts say so."""
    loaded = load(state_of(-1), folder)
    assert loaded["w"].tolist() == [loaded["step"]] * 2
    return int(loaded["step"])


def test_a_directory_that_is_not_empty_is_replaced(tmp_path: Path) -> None:
    for number, backend in enumerate(["torch_dist", "remesh", "remesh", "torch_dist"]):
        save(state_of(number), tmp_path, (backend, 1))
        assert step_in(tmp_path) == number
        if backend == "remesh":
            assert len(list(tmp_path.glob("data-*"))) == 1


def test_old_and_new_state_are_never_one_checkpoint(tmp_path: Path) -> None:
    save(state_of(1), tmp_path, ("torch_dist", 1))
    request = save(state_of(2), tmp_path, ("torch_dist", 1), async_sharded_save=True)
    assert request is not None
    assert step_in(tmp_path) == 1
    request.preloaded().run()
    # The tensors are new, and the common state is not.
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    for finalize in request.finalize_fns:
        finalize()
    assert step_in(tmp_path) == 2


def test_there_must_be_a_checkpoint(tmp_path: Path) -> None:
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(CheckpointingException, match="is not a distributed checkpoint"):
        load({}, tmp_path / "nowhere")
    save({"a": 1}, tmp_path)
    assert dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(CheckpointingException, match=r"metadata\.json: not the config"):
        load({}, tmp_path)


def test_tensors_are_removed_by_the_prefix_of_their_keys(tmp_path: Path) -> None:
    state = {key: shard(key, torch.ones(3)) for key in ("optimizer.a", "optimizer.b", "model.a")}
    save({**state, "step": 4}, tmp_path)
    for _ in range(2):
        dist_checkpointing.remove_sharded_tensors(tmp_path, "optimizer.")
        assert set(dist_checkpointing.load_tensors_metadata(tmp_path)) == {"model.a"}
        assert dist_checkpointing.load_plain_tensors(tmp_path)["model.a"].tolist() == [1, 1, 1]
        assert remesh.Checkpoint(tmp_path).verify().ok
        assert dist_checkpointing.load_common_state_dict(tmp_path) == {"step": 4}
    with pytest.raises(CheckpointingException, match=r"optimizer\.a"):
        load({"a": shard("optimizer.a", torch.ones(3))}, tmp_path)


def test_tensors_of_other_formats_are_not_removed(tmp_path: Path) -> None:
    state = {key: shard(key, torch.ones(3)) for key in ("optimizer.a", "model.a")}
    save(state, tmp_path / "all", ("remesh", 1))
    with pytest.raises(NotImplementedError, match=r"convert\(.*startswith\('optimizer\.'\)"):
        dist_checkpointing.remove_sharded_tensors(tmp_path / "all", "optimizer.")
    rest: Any = {"format": "remesh", "transform": {"optimizer.": None}}
    remesh.checkpoint.convert(tmp_path / "all", tmp_path / "model", **rest)
    assert set(remesh.Checkpoint(tmp_path / "model").index) == {"model.a"}


def test_arrays_of_zarr_are_loaded_and_listed(tmp_path: Path) -> None:
    keys = ("optimizer.a", "optimizer.b", "model.a")
    whole = np.arange(128, dtype=np.float32)
    rng = {"seed": 3}
    write_zarr(dict.fromkeys(keys, whole), tmp_path, {"step": 4, "rng/shard_0_1": rng})
    asked = {str(n): shard("model.a", torch.zeros(16), (0, n, 8)) for n in range(8)}
    loaded = load({**asked, "rng": ShardedObject("rng", None, (1,), (0,))}, tmp_path)
    assert torch.equal(torch.cat([loaded[str(n)] for n in range(8)]), torch.arange(128.0))
    assert (loaded["step"], loaded["rng"]) == (4, rng)
    assert set(dist_checkpointing.load_sharded_metadata(tmp_path)) == {*keys, "rng/shard_0_1"}
    with pytest.raises(CheckpointingException, match="no strategy to save_sharded"):
        save({"w": shard("w", torch.ones(2))}, tmp_path, ("zarr", 1))


def test_the_bytes_of_tensors_that_were_set_apart_are_given_back(tmp_path: Path) -> None:
    state = {key: shard(key, torch.ones(3)) for key in ("optimizer.a", "model.a")}
    strategy = TorchDistSaveShardedStrategy(separation_hint="optimizer.")
    save(state, tmp_path, strategy)
    request = save(state, tmp_path, strategy, async_sharded_save=True)  # replaces it
    assert request is not None
    request.execute_sync()
    assert len(list(tmp_path.glob("optimizer.*.distcp"))) == 1
    dist_checkpointing.remove_sharded_tensors(tmp_path, "optimizer.")
    assert not list(tmp_path.glob("optimizer.*"))
    assert dist_checkpointing.load_plain_tensors(tmp_path)["model.a"].tolist() == [1, 1, 1]


def test_common_state_among_the_objects_is_found(tmp_path: Path) -> None:
    """Newer Megatron has no `common.pt`, and writes more into `metadata.json`."""
    parts = {"step": 3, "deep": {"t": torch.ones(2)}, "top": torch.zeros(2), "pair": (1, [])}
    common = ShardedObject("common_state", parts, (1,), (0,))
    save({"w": shard("w", torch.ones(2)), "common": common}, tmp_path, ("torch_dist", 1))
    (tmp_path / "common.pt").unlink()
    (tmp_path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "new": [1]}'
    )
    loaded = load({"w": shard("w", torch.ones(2))}, tmp_path, strict="raise_all")
    del loaded["w"]
    assert str(loaded) == str(parts)
    assert list(dist_checkpointing.load_sharded_metadata(tmp_path)) == ["w"]


@pytest.mark.parametrize("backend", ["remesh", "torch_dist"])
def test_parameters_that_are_not_sharded_come_back_as_tensors(tmp_path: Path, backend: str) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    state = {"w": weight, "o": ShardedObject("o", {"w": weight}, (1,), (0,))}
    save(state, tmp_path, (backend, 1))
    loaded = load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)
    assert loaded["w"].tolist() == loaded["o"]["w"].tolist() == [1, 1]


def test_a_url_is_a_directory_too(tmp_path: Path) -> None:
    save(state_of(3), f"file://{tmp_path}/x")
    assert step_in(f"file://{tmp_path}/x") == 3


# ---------------------------------------------------------------------------------------------
# Strategies and arguments
# ---------------------------------------------------------------------------------------------


class _Own(SaveShardedStrategy):
    """A strategy of an application's own."""

    def __init__(self) -> None:
        super().__init__("own", 3)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        RemeshSaveShardedStrategy().save(sharded_state_dict, checkpoint_dir)


def test_strategies_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for action in StrategyAction:
        monkeypatch.setitem(default_strategies, action.value, {})
    own = OwnLoad()
    register_default_strategy(StrategyAction.LOAD_SHARDED, "own", 3, own)
    save(leaves(values=True), tmp_path, _Own(), ("torch", 1))
    loaded = load(leaves(values=False), tmp_path, None, ("torch", 1))
    assert own.checked == ["own", 3]
    assert loaded["common"]["step"] == 5
    assert loaded["rng"][0]["numpy"].tolist() == [0, 1, 2, 3]
    assert torch.equal(loaded["fused"], torch.arange(8.0).reshape(4, 2))
    # Objects are not listed by default.
    _, missing, unexpected = load(leaves(values=False), tmp_path, strict="return_all")
    assert (missing, unexpected) == (set(), {"rng", "extra", "none"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharded_strategy": ("paper", 1)}, "save_sharded with backend 'paper' version 1"),
        ({"sharded_strategy": ("remesh", 7)}, "version 7"),
        (
            {"sharded_strategy": _Own(), "common_strategy": ("remesh", 1)},
            "common state is stored as 'torch'",
        ),
        (
            {"sharded_strategy": _Own(), "async_sharded_save": True},
            "cannot save beside the training",
        ),
        (
            {"async_sharded_save": True, "async_strategy": "nvrx"},
            "set async_strategy to 'mcore'",
        ),
        ({"verify_integrity": True}, r"needs \w+ of Megatron Core 0\.19"),
    ],
)
def test_what_a_save_cannot_do_is_refused(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointingException, match=message):
        save({}, tmp_path, **arguments)


def test_the_default_is_megatrons_format(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path)
    loaders = (dist_checkpointing.get_default_load_sharded_strategy(at) for at in (None, tmp_path))
    assert {type(one) for one in loaders} == {TorchDistLoadShardedStrategy}
    assert isinstance(
        dist_checkpointing.get_default_save_sharded_strategy(), TorchDistSaveShardedStrategy
    )
    assert (tmp_path / "common.pt").exists()
    with pytest.raises(CheckpointingException, match="reads backend 'remesh', not 'torch_dist'"):
        load({}, tmp_path, ("remesh", 1))


def test_the_fourth_argument_may_be_the_newer_one(tmp_path: Path) -> None:
    save({"w": shard("w", torch.ones(2))}, tmp_path)
    overlapping = {n: shard("w", torch.zeros(2)) for n in "ab"}
    assert load(overlapping, tmp_path, None, False)["b"].tolist() == [1, 1]
    with pytest.raises(CheckpointingException, match="several main replicas"):
        load(overlapping, tmp_path, None, None)


def test_a_parameter_is_filled_and_dtypes_are_converted(tmp_path: Path) -> None:
    save({"w": shard("w", torch.full((2,), 1.5).double())}, tmp_path)
    param = torch.nn.Parameter(torch.zeros(2).bfloat16())
    loaded = load({"w": shard("w", param)}, tmp_path)
    assert param.tolist() == [1.5, 1.5]
    assert not loaded["w"].requires_grad
    asked = shard("w", torch.zeros(2)).without_data()
    assert load({"w": asked}, tmp_path)["w"].tolist() == [1.5, 1.5]
