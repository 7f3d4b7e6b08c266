"""The lease of operators or of masters: an object of the API server, for `remesh.elastic.lease`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import httpx2
from lightkube import ApiError, AsyncClient

from remesh.elastic.lease import Lease, LeaseConflictError
from remesh.kubernetes.api import CONFLICT, LEASES, errors_of, read


def parse_lease(found: Mapping[str, Any] | None) -> Lease:
    """The lease that an object of the API server is; its transitions are the terms after the first.

    Args:
        found: The object; None if there is none yet.
    """
    if found is None:
        return Lease()
    spec = found.get("spec") or {}
    term = (spec.get("leaseTransitions") or 0) + 1
    return Lease(found["metadata"]["resourceVersion"], spec.get("holderIdentity") or "", term)


def lease_object(
    lease: Lease, old: Mapping[str, Any] | None, name: str, seconds: float, now: datetime
) -> dict[str, Any]:
    """The object that a lease is to be.

    Args:
        lease: The lease.
        old: The object as it was read; None if there was none.
        name: Its name.
        seconds: Silence of a holder after which another takes it.
        now: The time.
    """
    spec = dict((old or {}).get("spec") or {})
    stamp = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if spec.get("holderIdentity") != lease.holder or "acquireTime" not in spec:
        spec["acquireTime"] = stamp
    spec |= {
        "holderIdentity": lease.holder,
        "leaseDurationSeconds": max(round(seconds), 1),
        "renewTime": stamp,
        "leaseTransitions": lease.term - 1,
    }
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": (old or {}).get("metadata") or {"name": name},
        "spec": spec,
    }


class ApiLeases:
    """The lease in the cluster; a `remesh.elastic.lease.Leases`.

    Args:
        client: Sends the requests.
        namespace: Where the lease is.
        name: Its name.
        seconds: Silence of a holder after which another takes it.
    """

    def __init__(self, client: AsyncClient, namespace: str, name: str, seconds: float) -> None:
        self._client = client
        self._namespace = namespace
        self._name = name
        self._seconds = seconds
        self._found: dict[str, Any] | None = None

    async def read(self) -> Lease:
        """The lease; `Lease()` if there is none yet."""
        self._found = await read(self._client, LEASES, self._namespace, self._name)
        return parse_lease(self._found)

    async def write(self, lease: Lease) -> None:
        """Write the lease that was read last, if it has not changed since."""
        now = datetime.now(UTC)
        made = lease_object(lease, self._found, self._name, self._seconds, now)
        made["metadata"] = {**made["metadata"], "namespace": self._namespace}
        body = LEASES.from_dict(made)
        with errors_of("write the lease"):
            try:
                if lease.version:
                    await self._client.replace(body, self._name)
                else:
                    await self._client.create(body)
            except ApiError as error:
                if error.status.code == CONFLICT:
                    raise LeaseConflictError from error
                raise


@asynccontextmanager
async def open_lease(place: str, seconds: float) -> AsyncIterator[ApiLeases]:
    """A lease in the cluster of this pod, or of KUBECONFIG.

    Args:
        place: Its name; or `NAMESPACE/NAME`.
        seconds: Silence of a holder after which another takes it.

    Raises:
        ClusterError: If no cluster is known.
    """
    namespace, _, name = place.rpartition("/")
    with errors_of("connect"):  # a request that hangs leaves time for another one
        client = AsyncClient(timeout=httpx2.Timeout(seconds / 5))
    try:
        yield ApiLeases(client, namespace or client.namespace, name, seconds)
    finally:
        await client.close()
