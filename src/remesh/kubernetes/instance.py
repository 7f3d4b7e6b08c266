"""Starting an operator: its key and its client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets

from lightkube import AsyncClient

from remesh.errors import ClusterError
from remesh.kubernetes.api import CONFLICT, SECRETS, ApiCluster, errors_of, read
from remesh.kubernetes.manifests import KEY_SECRET
from remesh.kubernetes.operator import OperatorOptions, run_operator


async def read_key(client: AsyncClient, namespace: str) -> bytes:
    """The operator's key; made if there is none yet.

    Raises:
        ClusterError: If it can be neither read nor made.
    """
    made = base64.b64encode(secrets.token_bytes(32)).decode()
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": KEY_SECRET, "namespace": namespace},
        "data": {"key": made},
    }
    for _ in range(2):
        found = await read(client, SECRETS, namespace, KEY_SECRET)
        if found is not None:
            return base64.b64decode(found["data"]["key"])
        with errors_of("make the operator's key", ignore=CONFLICT):
            await client.create(SECRETS.from_dict(secret))
    raise ClusterError(f"secret {namespace}/{KEY_SECRET} comes and goes")


def main(*, own_namespace: str | None, identity: str, options: OperatorOptions) -> None:
    """Run an operator until it is stopped.

    Args:
        own_namespace: Where its key is; by default where its account is.
        identity: Its name, for events.
        options: How it runs.

    Raises:
        ClusterError: If there is no cluster.
    """

    async def run() -> None:
        with errors_of("connect"):
            client = AsyncClient()
        try:
            await operate(client)
        finally:
            await client.close()

    async def operate(client: AsyncClient) -> None:
        key = await read_key(client, own_namespace or client.namespace)
        await run_operator(ApiCluster(client, key, identity), key, options)

    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        asyncio.run(run())
