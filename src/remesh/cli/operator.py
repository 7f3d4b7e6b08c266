"""`remesh operator`: looks after the ElasticJobs of a Kubernetes cluster."""

from __future__ import annotations

import logging
import os
import socket
import sys

import click

from remesh.cli import output


@click.command(
    epilog=output.example("remesh operator", "remesh operator --namespace ml --metrics-port 8080")
)
@click.option("--namespace", help="See jobs of this namespace only; all by default.")
@click.option(
    "--own-namespace",
    envvar="POD_NAMESPACE",
    help="Where its key is; by default $POD_NAMESPACE.",
)
@click.option("--metrics-port", default=0, help="Serve /metrics and /healthz here.")
@click.option(
    "--master-host",
    metavar="HOST",
    help="Where masters are reached, for an operator outside of the cluster.",
)
def operator(
    *,
    namespace: str | None,
    own_namespace: str | None,
    metrics_port: int,
    master_host: str | None,
) -> None:
    """Run the operator for the ElasticJobs of a Kubernetes cluster.

    Runs in the cluster (see `remesh manifests`), or anywhere with a KUBECONFIG. Run one at a time.
    """
    running = output.needs_kubernetes("remesh.kubernetes.operator")
    options = running.OperatorOptions(
        namespace=namespace, metrics_port=metrics_port, master_host=master_host
    )
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s"
    )
    for noisy in ("httpx2", "kopf", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    identity = os.environ.get("POD_NAME") or socket.gethostname()
    running.main(own_namespace=own_namespace, identity=identity, options=options)
