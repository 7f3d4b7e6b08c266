"""`remesh manifests` and `remesh operator`: what a cluster needs to run ElasticJobs."""

from __future__ import annotations

import logging
import os
import socket
import sys

import click

from remesh.cli import output


@click.command(
    epilog=output.example(
        "remesh manifests --image registry.example/remesh:1 | kubectl apply -f -",
    )
)
@click.option("--image", default="remesh:latest", help="Image of the operator.")
@click.option("--namespace", default="remesh", help="Where the operator runs.")
@click.option("--watch", metavar="NAMESPACE", help="Let it see jobs of this namespace only.")
def manifests(*, image: str, namespace: str, watch: str | None) -> None:
    """Print what a Kubernetes cluster needs to run ElasticJobs.

    That is the definition of the resource, the operator's account and rights, and its deployment.
    """
    with output.needs("this command", "kubernetes"):
        from remesh.kubernetes import manifests as made
    found = made.manifests(image=image, namespace=namespace, watched=watch)
    click.echo(made.to_yaml(found), nl=False)


@click.command(
    epilog=output.example("remesh operator", "remesh operator --namespace ml --metrics-port 8080")
)
@click.option("--namespace", help="See jobs of this namespace only; all by default.")
@click.option(
    "--own-namespace",
    envvar="POD_NAMESPACE",
    help="Where its key is; by default $POD_NAMESPACE.",
)
@click.option("--metrics-port", default=0, help="Serve /metrics and /healthz here; 0: nowhere.")
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
    with output.needs("this command", "kubernetes"):
        from remesh.kubernetes import operator as running
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s"
    )
    for noisy in ("httpx2", "kopf", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    running.main(
        namespace=namespace,
        own_namespace=own_namespace,
        metrics_port=metrics_port,
        master_host=master_host,
        identity=os.environ.get("POD_NAME") or socket.gethostname(),
    )
