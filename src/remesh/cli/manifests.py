"""`remesh manifests`: what a Kubernetes cluster needs before it can run ElasticJobs."""

from __future__ import annotations

from pathlib import Path

import click

from remesh.cli import output

DEFAULT_IMAGE = "remesh:latest"


@click.command(
    epilog=output.example(
        "remesh manifests --image registry.example/remesh:1 | kubectl apply -f -",
        "remesh manifests --only crd | kubectl apply -f -",
        "remesh manifests --image registry.example/remesh:1 --kustomize deploy/base",
    )
)
@click.option("--image", default=DEFAULT_IMAGE, show_default=True, help="Image of the operator.")
@click.option(
    "--namespace",
    default="remesh",
    show_default=True,
    help="Where the operator runs.",
)
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
    made = output.needs_kubernetes("remesh.kubernetes.manifests")
    parts: dict[str, list[dict[str, object]]] = {"crd": [], "rbac": [], "deployment": []}
    for each in made.manifests(image=image, namespace=namespace, watched=watch):
        kinds = {"CustomResourceDefinition": "crd", "Deployment": "deployment"}
        parts[kinds.get(each["kind"], "rbac")].append(each)
    if kustomize is None:
        chosen = [each for part, some in parts.items() if only in (None, part) for each in some]
        click.echo(made.to_yaml(chosen), nl=False)
        return
    directory = Path(kustomize)
    directory.mkdir(parents=True, exist_ok=True)
    for part, some in parts.items():
        (directory / f"{part}.yaml").write_text(made.to_yaml(some), encoding="utf-8")
    base = made.kustomization([f"{part}.yaml" for part in parts], namespace)
    (directory / "kustomization.yaml").write_text(made.to_yaml([base]), encoding="utf-8")
    click.echo(f"written to {directory}; kubectl apply --kustomize {directory}", err=True)
