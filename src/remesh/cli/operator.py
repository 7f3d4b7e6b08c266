"""`remesh operator`: looks after the ElasticJobs of a Kubernetes cluster."""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid

import click

from remesh.cli import output


@click.command(
    epilog=output.example("remesh operator", "remesh operator --namespace ml --metrics-port 8080")
)
@click.option("--namespace", help="See jobs of this namespace only; all by default.")
@click.option(
    "--own-namespace",
    envvar="POD_NAMESPACE",
    help="Where its key and its lease are; by default $POD_NAMESPACE.",
)
@click.option("--metrics-port", default=0, help="Serve /metrics and /healthz here.")
@click.option(
    "--master-host",
    metavar="HOST",
    help="Where masters are reached, for an operator outside of the cluster.",
)
@click.option(
    "--lease-seconds",
    default=15.0,
    show_default=True,
    type=click.FloatRange(min=1),
    help="Silence of the leader after which another instance takes over.",
)
def operator(
    *,
    namespace: str | None,
    own_namespace: str | None,
    metrics_port: int,
    master_host: str | None,
    lease_seconds: float,
) -> None:
    """Run the operator for the ElasticJobs of a Kubernetes cluster.

    Runs in the cluster (see `remesh manifests`), or anywhere with a KUBECONFIG. Of several
    instances one acts, and another takes over when it dies.
    """
    instance = output.needs_kubernetes("remesh.kubernetes.instance")
    options = output.needs_kubernetes("remesh.kubernetes.operator").OperatorOptions(
        namespace=namespace, metrics_port=metrics_port, master_host=master_host
    )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s"
    )
    for noisy in ("httpx2", "kopf", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    name = os.environ.get("POD_NAME") or socket.gethostname()
    instance.main(
        own_namespace=own_namespace,
        identity=f"{name}-{uuid.uuid4().hex[:8]}",
        lease_seconds=lease_seconds,
        options=options,
    )
