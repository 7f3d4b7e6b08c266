"""Leases as objects of the API server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from lightkube import AsyncClient

from remesh.elastic.lease import Lease, Leases
from remesh.kubernetes.api import LEASES
from remesh.kubernetes.leases import lease_object, open_lease, parse_lease
from remesh.testing.lease_conformance import SECONDS, LeasesConformance
from tests.kubernetes.bed import MISSING

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def test_a_lease_is_made_renewed_and_taken() -> None:
    assert parse_lease(None) == Lease()
    made = lease_object(Lease("", "first", 1), None, "lease", 15, NOON)
    assert made["spec"] == {
        "holderIdentity": "first",
        "leaseDurationSeconds": 15,
        "acquireTime": "2026-11-01T12:00:00.000000Z",
        "renewTime": "2026-11-01T12:00:00.000000Z",
        "leaseTransitions": 0,
    }
    made["metadata"]["resourceVersion"] = "7"
    assert parse_lease(made) == Lease("7", "first", 1)
    later = NOON.replace(hour=13)
    renewed = lease_object(Lease("7", "first", 1), made, "lease", 15, later)
    assert renewed["metadata"]["resourceVersion"] == "7"
    assert renewed["spec"]["acquireTime"] < renewed["spec"]["renewTime"]
    taken = lease_object(Lease("7", "second", 2), renewed, "lease", 15, later)
    assert taken["spec"]["acquireTime"] == taken["spec"]["renewTime"]
    assert taken["spec"]["leaseTransitions"] == 1


@pytest.mark.skipif(bool(MISSING), reason=f"no test cluster: set {', '.join(MISSING)}")
class TestApiLeases(LeasesConformance):
    @asynccontextmanager
    async def open_leases(self, number: int, tmp_path: Path) -> AsyncIterator[tuple[Leases, ...]]:
        name = f"remesh-test-{uuid.uuid4().hex}"
        async with AsyncExitStack() as stack:
            opened = [open_lease(f"default/{name}", SECONDS) for _ in range(number)]
            yield tuple([await stack.enter_async_context(each) for each in opened])
        client = AsyncClient()
        async for found in client.list(LEASES, namespace="default"):
            if found["metadata"]["name"] == name:
                await client.delete(LEASES, name, namespace="default")
        await client.close()
