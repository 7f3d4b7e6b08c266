"""The lease of the operators as an object of the API server."""

from __future__ import annotations

from datetime import UTC, datetime

from remesh.elastic.lease import Lease
from remesh.kubernetes.leases import lease_object, parse_lease

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
