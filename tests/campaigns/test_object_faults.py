"""A bucket behind a network that fails: saves, loads and checks succeed or raise; none is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from obstore.store import S3Store

import remesh
from remesh.storage.object_store import ObjectStorage
from tests.campaigns.settings import dice_of, lengths, noted, seed
from tests.campaigns.test_faults import load, save, stored_step
from tests.storage.faulty_proxy import FAULTS, Fault, FaultyProxy, Plan, faulty_proxy
from tests.storage.object_servers import BUCKET, S3Server
from tests.support import Raised, Returned, run_ranks, run_ranks_outcomes
from tests.support.outcomes import have_succeeded

PART_BYTES = 5 << 20  # the smallest that S3 accepts


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultyProxy]:
    with faulty_proxy(server.endpoint, Plan(f"object faults {seed()}")) as proxy:
        yield proxy


def place_at(endpoint: str, name: str) -> ObjectStorage:
    """A prefix of the bucket, asked for with short pauses and few repetitions."""
    pause = timedelta(milliseconds=2)
    store = S3Store(
        BUCKET,
        prefix=name,
        endpoint=endpoint,
        client_options={"allow_http": True, "timeout": timedelta(seconds=30)},
        retry_config={
            "max_retries": 2,
            "retry_timeout": timedelta(seconds=30),
            "backoff": {"init_backoff": pause, "max_backoff": 2 * pause, "base": 2},
        },
    )
    return ObjectStorage(f"s3://{BUCKET}/{name}", store, part_bytes=PART_BYTES)


def step_at(storage: ObjectStorage) -> int:
    """The step that is there, bit for bit; 0 if there is none."""
    try:
        return stored_step(storage)
    except remesh.CheckpointNotFoundError:
        return 0


def is_well(place: ObjectStorage) -> bool:
    return remesh.Checkpoint(place).verify().ok


def meet(
    server: S3Server, proxy: FaultyProxy, name: str, way: str, *, num_ranks: int, step: int
) -> bool:
    """Do something through the proxy; whether all ranks succeeded."""
    good = place_at(server.endpoint, name)
    places = [place_at(proxy.endpoint, name) for _ in range(num_ranks)]
    before, num_flips = step_at(good), proxy.plan.met["flip"]
    allowed = {before}
    if way == "save" or before == 0:
        outcomes = run_ranks_outcomes(num_ranks, save, places, step, "save")
        succeeded = have_succeeded(outcomes, good.url)
        # The answer to what announces a save may have been lost.
        allowed = {step} if succeeded else {before, step}
    elif way == "load":
        succeeded = have_succeeded(run_ranks_outcomes(num_ranks, load, places, before), good.url)
    else:
        checks = run_ranks_outcomes(1, lambda _: is_well(places[0]))
        succeeded = have_succeeded(checks, good.url)
        assert checks != [Returned(False)] or proxy.plan.met["flip"] > num_flips
    assert step_at(good) in allowed
    return succeeded


@pytest.mark.timeout(7200)
@lengths("num_runs", 12, 1000)
def test_requests_that_fail_at_random(
    server: S3Server, proxy: FaultyProxy, num_runs: int, covered: Callable[[str], None]
) -> None:
    plan = proxy.plan
    ends: Counter[str] = Counter()
    for number in range(num_runs):
        dice = dice_of("object faults", number)
        name, way = dice.choice("abc"), dice.choice(("save", "save", "load", "verify"))
        num_ranks = dice.choice((1, 2))
        # Every now and then one of 19, a large state, which a single rank uploads in parts.
        step = 19 * (number + 1) + dice.choice((0, 1, 1, 1))
        plan.rate = dice.choice((0.02, 0.1, 0.4))
        what = f"{way} {name}, {num_ranks} ranks, step {step}, rate {plan.rate}"
        with noted(f"run {number}: {what}"):
            succeeded = meet(server, proxy, name, way, num_ranks=num_ranks, step=step)
        ends[f"{way} {'went well' if succeeded else 'raised'}"] += 1
    covered(f"seed {seed()}: {dict(ends)}; {dict(plan.met)}")
    assert set(plan.met) == set(FAULTS)


@pytest.mark.parametrize("fault", ["drip", "refuse", "cut", "flip"])
def test_requests_that_always_fail(server: S3Server, proxy: FaultyProxy, fault: Fault) -> None:
    """The faults do what their names say, so that the campaign means something."""
    assert meet(server, proxy, fault, "save", num_ranks=2, step=1)
    proxy.plan.faults, proxy.plan.rate = (fault,), 1.0
    assert meet(server, proxy, fault, "load", num_ranks=2, step=1) == (fault == "drip")
    if fault != "flip":  # a save reads no data, and may overwrite a damaged record
        assert meet(server, proxy, fault, "save", num_ranks=1, step=2) == (fault == "drip")


@pytest.mark.parametrize("what", ["flip", "cut short", "missing"])
def test_damage_is_named_with_its_place(server: S3Server, what: str) -> None:
    place = place_at(server.endpoint, f"named {what}")
    run_ranks(2, save, [place, place], 1, "save")
    (path,) = (one for one in place.list() if one.endswith("/00001.safetensors"))
    data = bytearray(place.read(path))
    data[-1] ^= 1
    place.delete(path)
    if what != "missing":
        place.put(path, bytes(data if what == "flip" else data[:-8]), overwrite=True)
    for outcome in run_ranks_outcomes(2, load, [place, place], 1):
        assert isinstance(outcome, Raised)
        assert isinstance(outcome.error, remesh.CorruptCheckpointError)
        assert str(outcome.error).startswith(f"{place.url}/{path}: ")
