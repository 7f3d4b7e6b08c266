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
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    default_strategies,
    register_default_strategy,
)
from remesh.compat.megatron.strategies.native import (
    RemeshLoadShardedStrategy,
    RemeshSaveShardedStrategy,
)
from remesh.compat.megatron.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from tests.compat.megatron.layouts import flat_shards, row_shards

BACKENDS = ["remesh", "torch_dist", "zarr"]
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
    for rank, shard in expected.items():
        if shard.data.numel():
            assert torch.equal(found[rank], shard.data)
        else:
            assert rank not in found
    plain = load({"all": ShardedTensor.from_rank_offsets("moment", torch.zeros(2, 6))}, tmp_path)
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
    part = ShardedTensor.from_rank_offsets_flat(
        "moment", torch.zeros(1000), tuple(whole.shape), flattened_range=slice(5000, 6000)
    )
    report = remesh.load([part.to_remesh()], tmp_path)
    assert part.data is not None
    assert torch.equal(part.data, whole.reshape(-1)[5000:6000])
    assert report.bytes_needed == 4000
    assert report.bytes_read < whole.nbytes / 4


def leaves(*, values: bool) -> dict[str, Any]:
    """One of each kind; without values, as a state dict to load."""

    def ten(data: torch.Tensor) -> torch.Tensor:
        return data if values else torch.zeros_like(data)

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> Any:
        upper, lower = data.chunk(2)
        return {
            "upper": ShardedTensor.from_rank_offsets(f"{key}.upper", upper, replica_id=replica_id),
            "lower": [ShardedTensor.from_rank_offsets(f"{key}.lower", lower)],
        }

    def merge(found: Any) -> torch.Tensor:
        return torch.cat([found["upper"], *found["lower"]])

    rng = [{"python": (3, (1, 2)), "numpy": np.arange(4), "torch": torch.arange(3)}]
    return {
        "half": ShardedTensor.from_rank_offsets("half", ten(torch.randn(3, 4).bfloat16())),
        "layers": [
            {
                "weight": ShardedTensor.from_rank_offsets(
                    "layers.weight",
                    ten(torch.full((2, 2), float(n))),
                    (0, n, 3),
                    prepend_axis_num=1,
                )
            }
            for n in range(3)
        ],
        "scalar": ShardedTensor.from_rank_offsets("scalar", ten(torch.tensor(7))),
        "fused": ShardedTensorFactory("fused", ten(torch.arange(8.0).reshape(4, 2)), build, merge),
        "rng": ShardedObject("rng", rng if values else None, (2,), (0,)),
        "extra": ShardedObject("extra", io.BytesIO(b"state") if values else None, (2,), (1,)),
        "none": ShardedObject("none", None, (1, 1), (0, 0)),
        "local": {"here": LocalNonpersistentObject("mine")},
        "args": argparse.Namespace(lr=1e-3, dtype=torch.bfloat16) if values else "ignored",
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
    saved = leaves(values=True)
    half = saved["half"].data
    save(saved, tmp_path, (backend, 1), content_metadata={"version": 2})
    wanted = leaves(values=False)
    loaded = load(wanted, tmp_path)
    assert torch.equal(loaded["half"], half)
    assert loaded["half"].data_ptr() == wanted["half"].data.data_ptr()
    weights = [layer["weight"] for layer in loaded["layers"]]
    assert [weight.tolist() for weight in weights] == [[[n, n], [n, n]] for n in (0.0, 1.0, 2.0)]
    assert loaded["scalar"] == 7
    assert torch.equal(loaded["fused"], torch.arange(8.0).reshape(4, 2))
    assert loaded["rng"][0]["python"] == (3, (1, 2))
    assert loaded["rng"][0]["numpy"].tolist() == [0, 1, 2, 3]
    assert loaded["rng"][0]["torch"].tolist() == [0, 1, 2]
    assert loaded["none"] is None
    assert loaded["extra"].read() == b"state"
    assert loaded["local"] == {"here": "mine"}
    assert loaded["args"] == argparse.Namespace(lr=1e-3, dtype=torch.bfloat16)
    common = loaded["common"]
    assert common["step"] == 5
    assert common["nested"][0]["t"].tolist() == [0, 1, 2]
    assert isinstance(common["nested"][0]["a"], np.ndarray)
    assert common["nested"][1] == (1, "x")
    assert common[1] == {"int key": None}
    assert common["empty"] == {}
    assert common["half.dotted"].dtype == torch.bfloat16
    assert isinstance(wanted["fused"], ShardedTensorFactory)
    assert dist_checkpointing.load_content_metadata(tmp_path) == {"version": 2}


@backends
def test_metadata_and_plain_tensors(tmp_path: Path, backend: str) -> None:
    save(leaves(values=True), tmp_path, (backend, 1))
    tensors = dist_checkpointing.load_tensors_metadata(tmp_path)
    assert set(tensors) == {"half", "layers.weight", "scalar", "fused.upper", "fused.lower"}
    assert tensors["layers.weight"].global_shape == (3, 2, 2)
    assert tensors["layers.weight"].local_shape == (3, 2, 2)
    assert tensors["half"].dtype == torch.bfloat16
    assert tensors["half"].data is None
    everything = dist_checkpointing.load_sharded_metadata(tmp_path)
    objects = {"rng/shard_0_2", "extra/shard_1_2", "none/shard_0.0_1.1"}
    assert set(everything) == set(tensors) | objects
    assert everything["extra/shard_1_2"].global_offset == (1,)
    plain = dist_checkpointing.load_plain_tensors(tmp_path)
    assert set(plain) == set(tensors)
    assert plain["layers.weight"].shape == (3, 2, 2)
    common = dist_checkpointing.load_common_state_dict(tmp_path)
    assert set(common) == {"args", "common"}


@backends
@pytest.mark.parametrize(
    ("shape", "expected"), [((4,), [0, 1, 2, 0]), ((2,), [0, 1]), ((3,), [0, 1, 2])]
)
def test_another_global_shape_is_padded_or_cut_where_it_may_differ(
    tmp_path: Path, backend: str, shape: tuple[int], expected: list[int]
) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.arange(3))}, tmp_path, (backend, 1))
    wanted = ShardedTensor.from_rank_offsets("w", torch.full(shape, 9), allow_shape_mismatch=True)
    assert load({"w": wanted}, tmp_path)["w"].tolist() == expected
    strict = ShardedTensor.from_rank_offsets("w", torch.full((5,), 9))
    with pytest.raises(CheckpointingException, match=r"shape \(3,\) is stored, \(5,\) is wanted"):
        load({"w": strict}, tmp_path)
    assert strict.data is not None
    assert strict.data.tolist() == [9] * 5


@backends
def test_irregular_shards_with_a_hole_are_refused(tmp_path: Path, backend: str) -> None:
    def shard(offset: int, length: int) -> ShardedTensor:
        data = torch.full((length,), offset)
        return ShardedTensor("w", data, data.dtype, (length,), (6,), (offset,), None)

    save({"a": shard(0, 1), "b": shard(1, 5)}, tmp_path, (backend, 1))
    assert load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(6))}, tmp_path)[
        "w"
    ].tolist() == [0, 1, 1, 1, 1, 1]
    for validate in (True, False):
        with pytest.raises(CheckpointingException, match=r"no rank holds \[1:2\]"):
            save(
                {"a": shard(0, 1), "b": shard(2, 4)},
                tmp_path / str(validate),
                (backend, 1),
                validate_access_integrity=validate,
            )
    with pytest.raises(CheckpointingException, match=r"no rank holds \[1:6\]"):
        load({"a": shard(0, 1)}, tmp_path)
    assert load({"a": shard(0, 1)}, tmp_path, validate_access_integrity=False)["a"].tolist() == [0]


@backends
def test_only_main_replicas_are_written_and_all_are_loaded(tmp_path: Path, backend: str) -> None:
    state = {
        "main": ShardedTensor.from_rank_offsets("w", torch.ones(2)),
        "copy": ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=(0, 1)),
    }
    save(state, tmp_path, (backend, 1))
    loaded = load(state, tmp_path)
    assert loaded["main"].tolist() == loaded["copy"].tolist() == [1, 1]
    only_copies = {"copy": ShardedTensor.from_rank_offsets("w", torch.zeros(2), replica_id=1)}
    with pytest.raises(CheckpointingException, match="no main replica"):
        save(only_copies, tmp_path, (backend, 1))
    twice = {name: ShardedTensor.from_rank_offsets("w", torch.ones(2)) for name in "ab"}
    with pytest.raises(CheckpointingException, match="several main replicas"):
        save(twice, tmp_path, (backend, 1))


@pytest.mark.parametrize(
    ("others", "complaint"),
    [
        (ShardedTensor.from_rank_offsets("k", torch.zeros(2), (0, 1, 2)), "described|describes"),
        (ShardedObject("k", 1, (1,), (0,)), "a tensor on one rank and an object"),
    ],
)
def test_descriptions_of_one_key_must_agree(tmp_path: Path, others: Any, complaint: str) -> None:
    first = ShardedTensor.from_rank_offsets("k", torch.zeros(2).bfloat16(), (0, 0, 2))
    with pytest.raises(CheckpointingException, match=complaint):
        save({"a": first, "b": others}, tmp_path)


def test_objects_of_one_key_form_one_grid(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="grids of shapes"):
        save(
            {"a": ShardedObject("o", 1, (2,), (0,)), "b": ShardedObject("o", 1, (3,), (1,))},
            tmp_path,
        )
    with pytest.raises(
        CheckpointingException, match=r"o/shard_0_1: main replica on ranks \[0, 0\]"
    ):
        save({n: ShardedObject("o", 1, (1,), (0,)) for n in "ab"}, tmp_path)


def mismatched(tmp_path: Path, backend: str) -> dict[str, Any]:
    """Save `a` and `b`; returns a state dict that asks for `a` and `c`."""
    stored = {key: ShardedTensor.from_rank_offsets(key, torch.ones(2)) for key in "ab"}
    save({**stored, "o": ShardedObject("o", 1, (1,), (0,))}, tmp_path, (backend, 1))
    wanted = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(2)) for key in "ac"}
    return {**wanted, "p": ShardedObject("p", None, (1,), (0,))}


@backends
@pytest.mark.parametrize("strict", [*StrictHandling, "log_all", True, False])
def test_strictness(
    tmp_path: Path, backend: str, strict: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = mismatched(tmp_path, backend)
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
    assert (
        "Unexpected keys (asked for, but not stored): c, p" in caplog.text
    ) == handling.value.startswith("log")
    assert ("not asked for by any rank): b, o" in caplog.text) == (handling.value == "log_all")


def test_an_unknown_strictness_is_refused(tmp_path: Path) -> None:
    save({}, tmp_path)
    with pytest.raises(ValueError, match="strict='maybe' is none of assume_ok"):
        load({}, tmp_path, strict="maybe")


def test_a_factory_without_what_it_needs_says_so(tmp_path: Path) -> None:
    save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(1))}, tmp_path)
    factory = leaves(values=False)["fused"]
    with pytest.raises(ValueError, match="nothing was loaded for the factory"):
        load({"fused": factory}, tmp_path, strict="log_unexpected")


def test_parts_of_a_factory_may_be_the_same_tensor(tmp_path: Path) -> None:
    def build(key: str, data: torch.Tensor, replica: Any, _range: object) -> list[ShardedTensor]:
        parts = (data, data, data[1:])
        return [
            ShardedTensor.from_rank_offsets(f"{key}.{number}", part, replica_id=replica)
            for number, part in enumerate(parts)
        ]

    def state(start: int) -> dict[str, Any]:
        return {"w": ShardedTensorFactory("w", torch.arange(start, start + 5), build, list)}

    save(state(0), tmp_path)
    parts = load(state(10), tmp_path)["w"]
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4]]


def test_a_common_value_in_the_place_of_a_local_object_is_refused(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path)
    with pytest.raises(ValueError, match="two values meet"):
        load({"a": LocalNonpersistentObject(2)}, tmp_path)


def test_factories_are_applied_to_the_callers_dict_when_saving(tmp_path: Path) -> None:
    state = leaves(values=True)
    save(state, tmp_path)
    assert set(state["fused"]) == {"upper", "lower"}


def test_common_values_of_a_class_of_ones_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match=r"(?s)common state\.deep\.0.*Own"):
        save({"deep": [Own()]}, tmp_path)
    with pytest.raises(CheckpointingException, match=r"(?s)obj.*Own"):
        save({"o": ShardedObject("obj", Own(), (1,), (0,))}, tmp_path)
    assert not (tmp_path / "metadata.json").exists()


def test_a_directory_that_is_not_empty_is_replaced_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, backend in enumerate(["torch_dist", "remesh", "remesh", "torch_dist"]):
        save(state_of(number), tmp_path, (backend, 1))
        assert ("is not empty" in caplog.text) == (number > 0)
        loaded = load(state_of(-1), tmp_path)
        assert (loaded["w"].tolist(), loaded["step"]) == ([number] * 2, number)
        if backend == "remesh":
            assert len(list(tmp_path.glob("data-*"))) == 1


def state_of(step: int) -> dict[str, Any]:
    weight = ShardedTensor.from_rank_offsets("w", torch.full((2,), float(step)))
    return {"w": weight, "step": step}


def test_old_and_new_state_are_never_one_checkpoint(tmp_path: Path) -> None:
    save(state_of(1), tmp_path, ("torch_dist", 1))
    request = save(state_of(2), tmp_path, ("torch_dist", 1), async_sharded_save=True)
    assert request is not None
    assert load(state_of(0), tmp_path)["step"] == 1
    request.preloaded().run()
    # The tensors are new, and the common state is not.
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    for finalize in request.finalize_fns:
        finalize()
    loaded = load(state_of(0), tmp_path)
    assert (loaded["w"].tolist(), loaded["step"]) == ([2, 2], 2)


def test_a_checkpoint_that_cannot_be_replaced_stays_whole(tmp_path: Path) -> None:
    save(state_of(1), tmp_path, ("zarr", 1))
    with pytest.raises(CheckpointingException, match="cannot be replaced in place"):
        save(state_of(2), tmp_path, ("zarr", 1))
    loaded = load(state_of(0), tmp_path)
    assert (loaded["w"].tolist(), loaded["step"]) == ([1, 1], 1)


def test_there_must_be_a_checkpoint(tmp_path: Path) -> None:
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    with pytest.raises(CheckpointingException, match="is not a distributed checkpoint"):
        load({}, tmp_path / "nowhere")
    save({"a": 1}, tmp_path)
    assert dist_checkpointing.check_is_distributed_checkpoint(tmp_path)
    (tmp_path / "metadata.json").write_text("{")
    with pytest.raises(CheckpointingException, match=r"metadata\.json: not the config"):
        load({}, tmp_path)


@backends
def test_tensors_are_removed_by_the_prefix_of_their_keys(tmp_path: Path, backend: str) -> None:
    keys = ("optimizer.a", "optimizer.b", "model.a")
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in keys}
    save({**state, "step": 4}, tmp_path, (backend, 1))
    for _ in range(2):
        dist_checkpointing.remove_sharded_tensors(tmp_path, "optimizer.")
        assert set(dist_checkpointing.load_tensors_metadata(tmp_path)) == {"model.a"}
        assert dist_checkpointing.load_plain_tensors(tmp_path)["model.a"].tolist() == [1, 1, 1]
        assert remesh.Checkpoint(tmp_path).verify().ok
        assert dist_checkpointing.load_common_state_dict(tmp_path) == {"step": 4}
    with pytest.raises(CheckpointingException, match=r"optimizer\.a"):
        load({"a": ShardedTensor.from_rank_offsets("optimizer.a", torch.ones(3))}, tmp_path)


def test_the_bytes_of_tensors_that_were_set_apart_are_given_back(tmp_path: Path) -> None:
    keys = ("optimizer.a", "model.a")
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(3)) for key in keys}
    strategy = TorchDistSaveShardedStrategy(separation_hint="optimizer.")
    save(state, tmp_path, strategy)
    request = save(state, tmp_path, strategy, async_sharded_save=True)  # replaces it
    assert request is not None
    request.execute_sync()
    assert len(list(tmp_path.glob("optimizer.*.distcp"))) == 1
    dist_checkpointing.remove_sharded_tensors(tmp_path, "optimizer.")
    assert not list(tmp_path.glob("optimizer.*"))
    assert dist_checkpointing.load_plain_tensors(tmp_path)["model.a"].tolist() == [1, 1, 1]


class _Own(SaveShardedStrategy):
    """A strategy of an application's own."""

    def __init__(self) -> None:
        super().__init__("own", 3)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        RemeshSaveShardedStrategy().save(sharded_state_dict, checkpoint_dir)


class _LoadOwn(LoadShardedStrategy):
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        assert loaded_backend == "own"

    def check_version_compatibility(self, loaded_version: int) -> None:
        assert loaded_version == 3

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return RemeshLoadShardedStrategy().load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        return RemeshLoadShardedStrategy().load_tensors_metadata(checkpoint_dir)


def test_strategies_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for action in StrategyAction:
        monkeypatch.setitem(default_strategies, action.value, {})
    register_default_strategy(StrategyAction.LOAD_SHARDED, "own", 3, _LoadOwn())
    save(leaves(values=True), tmp_path, _Own(), ("torch", 1))
    loaded = load(leaves(values=False), tmp_path, None, ("torch", 1))
    assert loaded["common"]["step"] == 5
    assert loaded["rng"][0]["numpy"].tolist() == [0, 1, 2, 3]
    assert torch.equal(loaded["fused"], torch.arange(8.0).reshape(4, 2))
    # Objects are not listed by default.
    _, missing, unexpected = load(leaves(values=False), tmp_path, strict="return_all")
    assert (missing, unexpected) == (set(), {"rng", "extra", "none"})
    with pytest.raises(CheckpointingException, match="common state is stored as 'torch'"):
        save({}, tmp_path, _Own(), ("remesh", 1))
    with pytest.raises(CheckpointingException, match="cannot save beside the training"):
        save({}, tmp_path, _Own(), async_sharded_save=True)


def test_common_state_among_the_objects_is_found(tmp_path: Path) -> None:
    """Newer Megatron has no `common.pt`."""
    common = ShardedObject("common_state", {"step": 3, "deep": {"t": torch.ones(2)}}, (1,), (0,))
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    save({"w": shard, "common": common}, tmp_path, ("torch_dist", 1))
    (tmp_path / "common.pt").unlink()
    loaded = load({"w": shard}, tmp_path, strict="raise_all")
    assert loaded["step"] == 3
    assert loaded["deep"]["t"].tolist() == [1, 1]


class Own:
    """A class that no unpickler of ours knows."""


def test_a_class_in_the_common_file_of_others_must_be_allowed(tmp_path: Path) -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(2))
    save({"w": shard}, tmp_path, ("torch_dist", 1))
    torch.save({"own": Own(), "step": 1}, tmp_path / "common.pt")
    name = f"{__name__}.Own"
    with pytest.raises(
        CheckpointingException, match=rf"(?s){name}.*remesh\.formats\.Source\(path, allow"
    ):
        load({"w": shard}, tmp_path)
    loaded = load({"w": shard}, remesh.formats.Source(tmp_path, allow=(name,)))
    assert isinstance(loaded["own"], Own)
    assert loaded["step"] == 1


def test_the_config_of_newer_megatron_is_understood(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path, ("torch_dist", 1))
    (tmp_path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "new": [1]}'
    )
    assert load({}, tmp_path) == {"step": 1}


def test_damage_is_found(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, tmp_path, ("remesh", 1))
    (file,) = tmp_path.glob("data-*/00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointingException, match=r"00000\.safetensors"):
        load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1000))}, tmp_path)


def test_backends_versions_and_strategies_are_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointingException, match="save_sharded with backend 'paper' version 1"):
        save({}, tmp_path, ("paper", 1))
    with pytest.raises(CheckpointingException, match="version 7"):
        save({}, tmp_path, ("remesh", 7))
    save({}, tmp_path)
    with pytest.raises(CheckpointingException, match="reads backend 'remesh', not 'torch_dist'"):
        load({}, tmp_path, ("remesh", 1))


def test_the_default_is_megatrons_format(tmp_path: Path) -> None:
    save({"step": 3}, tmp_path)
    loaders = (dist_checkpointing.get_default_load_sharded_strategy(at) for at in (None, tmp_path))
    assert {type(one) for one in loaders} == {TorchDistLoadShardedStrategy}
    assert isinstance(
        dist_checkpointing.get_default_save_sharded_strategy(), TorchDistSaveShardedStrategy
    )
    assert (tmp_path / "common.pt").exists()


def test_the_fourth_argument_may_be_the_newer_one(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path)
    overlapping = {n: ShardedTensor.from_rank_offsets("w", torch.zeros(2)) for n in "ab"}
    assert load(overlapping, tmp_path, None, False)["b"].tolist() == [1, 1]
    with pytest.raises(CheckpointingException, match="several main replicas"):
        load(overlapping, tmp_path, None, None)


def test_a_parameter_is_filled_and_dtypes_are_converted(tmp_path: Path) -> None:
    save({"w": ShardedTensor.from_rank_offsets("w", torch.full((2,), 1.5).double())}, tmp_path)
    param = torch.nn.Parameter(torch.zeros(2).bfloat16())
    loaded = load({"w": ShardedTensor.from_rank_offsets("w", param)}, tmp_path)
    assert param.tolist() == [1.5, 1.5]
    assert not loaded["w"].requires_grad
    asked = ShardedTensor.from_rank_offsets("w", torch.zeros(2)).without_data()
    assert load({"w": asked}, tmp_path)["w"].tolist() == [1.5, 1.5]


def test_a_list_that_mixes_kinds_cannot_be_put_together(tmp_path: Path) -> None:
    shards = [ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, n, 2)) for n in range(2)]
    save({"mixed": [*shards, 5]}, tmp_path)
    with pytest.raises(ValueError, match="use a dict"):
        load({"mixed": [*shards, 5]}, tmp_path)


def test_a_url_is_a_directory_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/x"
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2)), "a": 1}, url)
    assert load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, url)["a"] == 1
