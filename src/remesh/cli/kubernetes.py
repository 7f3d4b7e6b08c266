"""`remesh manifests` and `remesh operator`: what a cluster needs to run ElasticJobs."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

import click

from remesh.cli import output


@click.command(
    epilog=output.example(
        "remesh manifests --image registry.example/remesh:1 | kubectl apply -f -",
        "remesh manifests --only crd | kubectl apply -f -",
        "remesh manifests --image registry.example/remesh:1 --kustomize deploy/base",
    )
)
@click.option("--image", default="remesh:latest", help="Image of the operator.")
@click.option("--namespace", default="remesh", help="Where the operator runs.")
@click.option("--watch", metavar="NAMESPACE", help="Let it see jobs of this namespace only.")
@click.option(
    "--only",
    type=click.Choice(["crd", "rbac", "deployment"]),
    help="Print this part alone.",
)
@click.option(
    "--kustomize", metavar="DIR", help="Write a base for kustomize here, instead of printing."
)
def manifests(
    *, image: str, namespace: str, watch: str | None, only: str | None, kustomize: str | None
) -> None:
    """Print what a Kubernetes cluster needs to run ElasticJobs.

    That is the definition of the resource, the operator's account and rights, and its deployment.
    """
    with output.needs("this command", "kubernetes"):
        from remesh.kubernetes import manifests as made
    parts: dict[str, list[dict[str, object]]] = {"crd": [], "rbac": [], "deployment": []}
    for each in made.manifests(image=image, namespace=namespace, watched=watch):
        kinds = {"CustomResourceDefinition": "crd", "Deployment": "deployment"}
        parts[kinds.get(each["kind"], "rbac")].append(each)
    if kustomize is None:
        chosen = [each for part, some in parts.items() if only in (None, part) for each in some]
        click.echo(made.to_yaml(chosen), nl=False)
        return
    directory = Path(kustomize)
    base = made.kustomization([f"{part}.yaml" for part in parts], namespace)
    with output.writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for part, some in {**parts, "kustomization": [base]}.items():
            (directory / f"{part}.yaml").write_text(made.to_yaml(some), encoding="utf-8")
    click.echo(f"written to {directory}; kubectl apply --kustomize {directory}", err=True)


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
