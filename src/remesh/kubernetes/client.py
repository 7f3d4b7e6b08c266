"""What `remesh job` does: jobs of a cluster from a user's machine, with the user's rights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from lightkube import ApiError, Client

from remesh.errors import ClusterError, StorageError
from remesh.kubernetes.api import JOBS, NOT_FOUND, PODS, errors_of
from remesh.kubernetes.looking import Key
from remesh.kubernetes.observed import Pod, Role, parse_pod
from remesh.kubernetes.resource import KIND, LABEL_JOB, Job, parse_job, problem_of


def connect(namespace: str | None) -> Client:
    """A client for the cluster of KUBECONFIG.

    Args:
        namespace: The namespace; that of KUBECONFIG by default.

    Raises:
        ClusterError: If no cluster is known.
    """
    with errors_of("connect"):
        return Client(namespace=namespace)


def read_manifest(path: str, namespace: str) -> dict[str, Any]:
    """The ElasticJob in a YAML file.

    Raises:
        StorageError: If the file cannot be read.
        ClusterError: If it does not hold one valid ElasticJob.
    """
    try:
        documents = [each for each in yaml.safe_load_all(Path(path).read_text("utf-8")) if each]
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ClusterError(f"{path} is not YAML: {error}") from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ClusterError(f"{path} should hold one {KIND}; apply other objects with kubectl")
    manifest = documents[0]
    if manifest.get("kind") != KIND:
        raise ClusterError(f"{path} holds a {manifest.get('kind')}, not an {KIND}")
    meta = manifest.setdefault("metadata", {})
    meta.setdefault("namespace", namespace)
    problem = problem_of(parse_job(manifest).spec)
    if problem:
        raise ClusterError(f"{path}: {problem}")
    return manifest


def submit(client: Client, manifest: dict[str, Any]) -> Key:
    """Create a job."""
    meta = manifest["metadata"]
    with errors_of(f"submit job {meta.get('name', '')}"):
        client.create(JOBS.from_dict(manifest), namespace=meta["namespace"])
    return Key(meta["namespace"], meta["name"])


def jobs(client: Client) -> list[Job]:
    """The jobs of the namespace, by name."""
    with errors_of("list jobs"):
        found = [parse_job(each) for each in client.list(JOBS)]
    return sorted(found, key=lambda job: job.name)


def job(client: Client, name: str) -> Job:
    """One job.

    Raises:
        ClusterError: If there is none of this name.
    """
    with errors_of(f"read job {name}"):
        return parse_job(client.get(JOBS, name))


def pods(client: Client, name: str) -> list[Pod]:
    """The pods of a job: masters first, then workers, by number."""
    with errors_of(f"list the pods of job {name}"):
        labels: Any = {LABEL_JOB: name}
        found = [parse_pod(each) for each in client.list(PODS, labels=labels)]
    return sorted((pod for pod in found if pod is not None), key=lambda pod: (pod.role, pod.index))


def choose_pod(found: list[Pod], *, master: bool, worker: int | None) -> Pod:
    """The pod whose log is wanted: that of rank 0, unless another is named.

    Raises:
        ClusterError: If there is none.
    """
    role = Role.MASTER if master else Role.WORKER
    chosen = [pod for pod in found if pod.role is role and worker in (None, pod.index)]
    if not chosen:
        known = ", ".join(pod.name for pod in found) or "none"
        raise ClusterError(f"there is no such pod of the job; its pods: {known}")
    if master:
        return chosen[-1]
    return next((pod for pod in chosen if not pod.has_ended), chosen[0])


def log_lines(client: Client, pod: Pod, *, follow: bool, tail: int | None) -> Iterator[str]:
    """The log of a pod, line by line."""
    with errors_of(f"read the log of {pod.name}"):
        yield from client.log(pod.name, follow=follow, tail_lines=tail)


def delete(
    client: Client,
    name: str,
    *,
    wait_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Delete a job; its workers save first.

    Args:
        client: The client.
        name: The job.
        wait_seconds: How long to wait until it is gone; 0: not at all.
        clock: Seconds that never jump.
        sleep: Lets seconds pass.

    Returns:
        Whether it is gone.
    """
    with errors_of(f"delete job {name}"):
        client.delete(JOBS, name)
        ends = clock() + wait_seconds
        while clock() < ends:
            try:
                client.get(JOBS, name)
            except ApiError as error:
                if error.status.code == NOT_FOUND:
                    return True
                raise
            sleep(0.5)
    return False
