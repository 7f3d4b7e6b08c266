"""Several ranks: who writes and reads what, errors on every rank, saves beside the training."""

from __future__ import annotations

import dataclasses
import functools
import logging.handlers
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from remesh.compat import megatron as dist_checkpointing
from remesh.compat.megatron import (
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensorFactory,
    load,
    load_common_state_dict,
    save,
)
from remesh.compat.megatron.core import check_is_distributed_checkpoint
from remesh.compat.megatron.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from remesh.compat.megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from remesh.compat.megatron.strategies.native import (
    RemeshLoadShardedStrategy,
    RemeshSaveShardedStrategy,
)
from remesh.compat.megatron.validation import determine_global_metadata
from remesh.exchange import Exchange
from tests.compat.megatron.layouts import OwnLoad, flat_shard, may_have_children, shard
from tests.support import Raised, Returned, run_processes, run_processes_outcomes


def message_of(action: Callable[[], object]) -> str:
    """What a call is refused with."""
    with pytest.raises(CheckpointingException) as caught:
        action()
    return str(caught.value)


def replicated(rank: int, *, values: bool) -> dict[str, Any]:
    """Four tensors that every rank has, and one that rank 0 alone has."""
    sizes = {f"w{n}": 1000 * (n + 1) for n in range(4)} | ({} if rank else {"own": 10})
    state: dict[str, Any] = {
        name: shard(name, torch.arange(size) * values, replica_id=rank)
        for name, size in sizes.items()
    }
    state["rng"] = ShardedObject("rng", {"rank": rank}, (2,), (rank,))
    return state


def bytes_by_rank(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.glob("data-*/0*.safetensors")}


def _share_the_work(exchange: Exchange, folder: Path) -> dict[str, Any]:
    rank = exchange.rank
    found: dict[str, Any] = {}
    # Alone, a strategy writes on main replicas.
    save({**replicated(rank, values=True), "step": 1}, folder / "plain", ("remesh", 1))
    found["plain"] = bytes_by_rank(folder / "plain")
    shared = replicated(rank, values=True)
    wrapper = FullyParallelSaveStrategyWrapper(RemeshSaveShardedStrategy(), dist.group.WORLD)
    for _ in range(2):
        save({**shared, "step": 2}, folder / "shared", wrapper)
    found["shared"] = bytes_by_rank(folder / "shared")
    for base in (RemeshLoadShardedStrategy(), OwnLoad()):
        strategy = FullyParallelLoadStrategyWrapper(base, exchange_algo="gather_rounds")
        loaded = load(replicated(rank, values=False), folder / "shared", strategy)
        for n in range(4):
            assert torch.equal(loaded[f"w{n}"], torch.arange(1000 * (n + 1)))
        assert ("own" in loaded) == (rank == 0)
        assert loaded["rng"] == {"rank": rank}
        assert loaded["step"] == 2
    return found


def test_wrappers_share_the_work(tmp_path: Path) -> None:
    first, second = run_processes(2, _share_the_work, tmp_path)
    assert first == second
    assert set(first["plain"]) == {"00000.safetensors"}
    # 80 kB in four tensors of 8 to 32 kB: half each, and the small one of rank 0 alone.
    assert set(first["shared"]) == {"00000.safetensors", "00001.safetensors"}
    assert max(first["shared"].values()) <= 40_080 + 4096  # the header


def _refuse_everywhere(exchange: Exchange, folder: Path, backend: str) -> None:
    rank = exchange.rank
    save = functools.partial(dist_checkpointing.save, sharded_strategy=(backend, 1))
    row = torch.full((2,), rank)
    good = {"w": shard("w", row, (0, rank, 2))}
    save({**good, "common": rank, "same": 1}, folder)
    hole = {"w": shard("w", row, (0, 0, 2), replica_id=rank)}
    only_rank_1 = {**good} if rank == 0 else {"c": shard("c", row)}
    unstorable: Any = object() if rank == 1 else 1
    no_data = {"w": good["w"].without_data() if rank == 1 else good["w"]}
    flat = flat_shard("f", row, (4,), flattened_range=slice(2 * rank, 2 * rank + 2))
    no_grid = dataclasses.replace(flat)
    no_grid.global_offset = (rank,)
    wrong: list[tuple[str, Callable[[], object]]] = [
        (
            "f: there is no data to save",
            lambda: save({"f": flat.without_data() if rank == 1 else flat}, folder),
        ),
        ("f", lambda: save({"f": no_grid}, folder, validate_access_integrity=False)),
        ("no data to save", lambda: save(no_data, folder)),
        (
            "not a distributed checkpoint",
            lambda: load(good, folder if rank == 0 else folder / "elsewhere"),
        ),
        ("[2:4]", lambda: save(hole, folder)),
        ("[2:4]", lambda: save(hole, folder, validate_access_integrity=False)),
        ("[2:4]", lambda: load(hole, folder)),
        ("c", lambda: load(only_rank_1, folder, None, False)),
        ("c", lambda: load(only_rank_1, folder, None, False, strict="raise_unexpected")),
        (
            "o/shard_1_2",
            lambda: save({"o": ShardedObject("o", unstorable, (2,), (rank,))}, folder),
        ),
        ("value", lambda: save({"value": unstorable}, folder)),
    ]
    for part, call in wrong:
        assert part in message_of(call)
    # After all that the ranks still understand each other, and the checkpoint is whole.
    zeros = shard("w", torch.zeros(2), (0, rank, 2))
    loaded, missing, unexpected = load({"w": zeros}, folder, strict="return_all")
    assert (missing, unexpected) == (set(), set())
    assert loaded["w"].tolist() == [rank, rank]
    assert load_common_state_dict(folder) == {"common": 0, "same": 1}


@pytest.mark.parametrize("backend", ["remesh", "torch_dist"])
def test_every_rank_raises(tmp_path: Path, backend: str) -> None:
    run_processes(2, _refuse_everywhere, tmp_path / "checkpoint", backend)


def _fail_in_own_code(exchange: Exchange, folder: Path) -> None:
    rank = exchange.rank
    plain = {"w": shard("w", torch.ones(2), (0, rank, 2)), "step": 1}

    def build(key: str, data: torch.Tensor, *_: Any) -> Any:
        return {"part": shard(key, data, (0, rank, 2))}

    def fail(*_: Any) -> Any:
        if rank == 1:
            raise ValueError("step of mine")
        return {}

    def state(build: Any = build, merge: Any = fail) -> Any:
        return {**plain, "f": ShardedTensorFactory("f", torch.ones(2), build, merge)}

    save(state(), folder)
    # It is asked for only if ranks are compared.
    options: dict[str, Any] = {"preprocess_common_before_consistancy_check": fail}
    save(plain, folder, validate_access_integrity=False, **options)
    save(state(), folder)
    local = {**plain, "step": LocalNonpersistentObject(2)} if rank == 1 else plain
    calls: list[Callable[[], object]] = [
        lambda: save(state(build=fail), folder),
        lambda: save(plain, folder, **options),
        lambda: load(state(build=fail), folder),
        lambda: load(local, folder, validate_access_integrity=False),
        lambda: load(state(merge=fail), folder),
    ]
    for call in calls:
        with pytest.raises(ValueError if rank == 1 else CheckpointingException, match="step"):
            call()


def test_every_rank_hears_of_a_function_of_the_application_that_fails(tmp_path: Path) -> None:
    run_processes(2, _fail_in_own_code, tmp_path / "checkpoint")


def _differ(exchange: Exchange, folder: Path) -> list[str]:
    logger = logging.getLogger("remesh.compat.megatron.validation")
    kept = logging.handlers.BufferingHandler(100)
    logger.addHandler(kept)
    state = {"t": {"loss": exchange.rank, "same": torch.ones(2)}, "x": 1}
    save(state, folder)
    save(
        state,
        folder,
        preprocess_common_before_consistancy_check=lambda common: {"x": common["x"]},
    )
    return [record.getMessage() for record in kept.buffer]


def test_common_state_that_differs_is_pointed_out(tmp_path: Path) -> None:
    first, second = run_processes(2, _differ, tmp_path / "checkpoint")
    assert first == []
    message, advice = second
    assert message.startswith("Rank 1 common state dict differs from rank 0 common state dict. ")
    assert "put what belongs to a rank into a ShardedObject" in advice
    assert "('t', 'loss')" in message
    assert "same" not in message


def slow_write(folder: str, _staged: object, text: str) -> None:
    time.sleep(0.2)
    Path(folder, text).write_text(text)


def fail_on(rank: int, mine: int) -> None:
    if rank == mine:
        raise OSError("no room")


SECONDS = 240.0
"""For ranks that start processes, each of which imports torch."""

Writer = Literal["thread", "process"]


def _in_the_background(exchange: Exchange, folder: Path, writer: Writer) -> list[str]:
    may_have_children()
    rank = exchange.rank
    queue = AsyncCallsQueue(persistent=True)
    strategy = RemeshSaveShardedStrategy(writer=writer)
    data = torch.full((4,), float(rank))
    order: list[str] = []
    strategies: list[Any] = [strategy, strategy, ("torch_dist", 1)]
    for number, sharded in enumerate(strategies):
        state = {"w": shard("w", data, (0, rank, 2)), "step": number}
        request = save(state, folder / str(number), sharded, async_sharded_save=True)
        assert isinstance(request, AsyncRequest)
        request.add_finalize_fn(functools.partial(order.append, f"save {number}"))
        assert queue.schedule_async_request(request) == number
        data.fill_(-1)
        with pytest.raises(RuntimeError, match="scheduled already"):
            queue._active[-1].request.add_finalize_fn(print)
        data.fill_(float(rank))
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue.get_num_unfinalized_calls() == 0
    assert strategy.saver.num_plans_reused == 1
    mine = AsyncRequest(
        slow_write, (str(folder), None, f"mine {rank}"), [lambda: order.append("x")]
    )
    assert queue.schedule_async_request(mine) == 3
    queue.close()
    strategy.saver.close()
    for number in range(3):
        assert check_is_distributed_checkpoint(folder / str(number))
        zeros = shard("w", torch.zeros(4), (0, rank, 2))
        loaded = load({"w": zeros}, folder / str(number))
        assert (loaded["step"], loaded["w"].tolist()) == (number, [rank] * 4)
    return order


@pytest.mark.parametrize("writer", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_saves_beside_the_training(tmp_path: Path, writer: Writer) -> None:
    orders = run_processes(2, _in_the_background, tmp_path, writer, timeout=SECONDS)
    assert orders == [["save 0", "save 1", "save 2", "x"]] * 2
    assert sorted(file.name for file in tmp_path.glob("mine*")) == ["mine 0", "mine 1"]


def _fail_in_the_background(exchange: Exchange, folder: Path) -> str:
    queue = AsyncCallsQueue()
    finalized: list[int] = []
    queue.schedule_async_request(
        AsyncRequest(fail_on, (1, exchange.rank), [lambda: finalized.append(0)])
    )
    message = message_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
    assert ("[raised on rank 1]" in message) == (exchange.rank == 0)
    assert finalized == []
    assert queue.get_num_unfinalized_calls() == 0

    def preload() -> None:
        if exchange.rank == 0:
            raise OSError("no memory")

    request = AsyncRequest(fail_on, (1, 0), [], preload_fn=preload)
    with pytest.raises((CheckpointingException, OSError)) as caught:
        queue.schedule_async_request(request)
    message += str(caught.value)
    # Given up, a save that is written is no checkpoint.
    state = {"w": shard("w", torch.ones(2), (0, exchange.rank, 2))}
    abandoned = save(state, folder, async_sharded_save=True)
    assert abandoned is not None
    queue.schedule_async_request(abandoned)
    queue.close(abort=True)
    assert not check_is_distributed_checkpoint(folder)
    at_once = save(state, folder / "at once", async_sharded_save=True)
    assert at_once is not None
    at_once.execute_sync()
    assert check_is_distributed_checkpoint(folder / "at once")
    return message


def test_a_background_that_fails_on_one_rank_raises_on_all(tmp_path: Path) -> None:
    outcomes = run_processes_outcomes(2, _fail_in_the_background, tmp_path / "c")
    for outcome in outcomes:
        if isinstance(outcome, Raised):
            raise outcome.error
        assert isinstance(outcome, Returned)
        assert "no room" in outcome.value
        assert "no memory" in outcome.value


def _alone(exchange: Exchange, folder: Path) -> None:
    rank = exchange.rank
    own = [dist.new_group([0]), dist.new_group([1])][rank]
    save({"w": shard("w", torch.ones(2) + rank, (0, rank, 2))}, folder)
    # Each rank asks for everything, and is all that must fit together.
    wanted = {"w": shard("w", torch.zeros(4))}
    assert determine_global_metadata(wanted, process_group=own)[1] == [[wanted["w"].without_data()]]
    with pytest.raises(CheckpointingException, match="Invalid access pattern"):
        load(wanted, folder)
    assert load(wanted, folder, process_group=own)["w"].tolist() == [1, 1, 2, 2]


def test_a_group_of_ranks_may_ask_for_everything(tmp_path: Path) -> None:
    run_processes(2, _alone, tmp_path / "checkpoint")


def _groups(exchange: Exchange, folder: Path) -> None:
    """Two groups of two: columns between groups, copies within them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    column, copy = divmod(exchange.rank, 2)
    group = groups[column]
    whole = {"w": torch.arange(8.0).reshape(4, 2), "v": torch.arange(8.0, 16.0).reshape(4, 2)}
    state = {
        key: shard(key, of.chunk(2, 1)[column].clone(), (1, column, 2), replica_id=(0, copy))
        for key, of in whole.items()
    }
    save(state, folder, FullyParallelSaveStrategyWrapper(RemeshSaveShardedStrategy(), group))
    rows = {key: shard(key, torch.zeros(1, 2), (0, exchange.rank, 4)) for key in whole}
    wrapper = FullyParallelLoadStrategyWrapper(RemeshLoadShardedStrategy(), group)
    loaded = load(rows, folder, wrapper)
    for key, of in whole.items():
        assert torch.equal(loaded[key], of[exchange.rank : exchange.rank + 1])


def test_work_is_shared_within_groups(tmp_path: Path) -> None:
    run_processes(4, _groups, tmp_path)
    assert len(bytes_by_rank(tmp_path)) == 4


def _halves_on_rank_1(rank: int, whole: torch.Tensor) -> dict[str, Any]:
    """The main replica on rank 0, and on rank 1 a copy of each half."""
    if rank == 0:
        return {"w": shard("w", whole.clone())}
    halves = enumerate(whole.chunk(2))
    return {f"w{n}": shard("w", half.clone(), (0, n, 2), replica_id=1) for n, half in halves}


def _copies_cut_otherwise(exchange: Exchange, folder: Path) -> None:
    rank, whole = exchange.rank, torch.arange(8.0)
    shared = FullyParallelSaveStrategyWrapper(RemeshSaveShardedStrategy())
    for strategy in (RemeshSaveShardedStrategy(), shared):
        place = folder / type(strategy).__name__
        save(_halves_on_rank_1(rank, whole), place, strategy)
        request = save(
            _halves_on_rank_1(rank, whole), place / "async", strategy, async_sharded_save=True
        )
        assert isinstance(request, AsyncRequest)
        request.execute_sync()
        for saved in (place, place / "async"):
            loaded = load(_halves_on_rank_1(rank, torch.zeros(8)), saved)
            assert torch.equal(torch.cat(list(loaded.values())), whole)
        with pytest.raises(CheckpointingException, match="no main replica"):
            save(_halves_on_rank_1(1, whole), folder / "no main", strategy)
    mixed = {**_halves_on_rank_1(rank, whole), "b": shard("b", whole.clone(), replica_id=1)}
    with pytest.raises(CheckpointingException, match=r"b: .*no main replica"):
        save(mixed, folder / "no main", shared, validate_access_integrity=False)


def test_copies_that_are_cut_otherwise_than_their_main_replica_are_not_written(
    tmp_path: Path,
) -> None:
    """As with Megatron's own wrapper, which looks for a main replica of the same shard."""
    run_processes(2, _copies_cut_otherwise, tmp_path)


def _ranges_and_boxes(exchange: Exchange, folder: Path) -> None:
    """A tensor of which one rank has a flattened range, and the other a box."""
    rank, whole = exchange.rank, torch.arange(8.0).reshape(2, 4)
    row, place = whole[rank : rank + 1].clone(), (0, rank, 2)
    flat = flat_shard("w", row.flatten(), (1, 4), place, flattened_range=slice(0, 4))
    save({"w": flat if rank == 0 else shard("w", row, place)}, folder, ("torch_dist", 1))
    loaded = load({"w": shard("w", torch.zeros(1, 4), place)}, folder)
    assert torch.equal(loaded["w"], row)


def test_a_range_on_one_rank_and_a_box_on_another(tmp_path: Path) -> None:
    run_processes(2, _ranges_and_boxes, tmp_path)
