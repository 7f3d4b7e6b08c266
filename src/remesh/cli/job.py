"""`remesh job`: jobs on Kubernetes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from remesh.cli import output
from remesh.kubernetes.conditions import STALLED

if TYPE_CHECKING:
    from remesh.kubernetes.resource import Job

_namespace = click.option("--namespace", "-n", help="Namespace; that of KUBECONFIG by default.")


def _client(namespace: str | None) -> tuple[Any, Any]:
    """The module with what is done, and a client of the cluster."""
    does = output.needs_kubernetes("remesh.kubernetes.client")
    client = does.connect(namespace)
    click.get_current_context().call_on_close(client.close)
    return does, client


@click.group(
    epilog=output.example(
        "remesh job submit job.yaml", "remesh job status train", "remesh job logs train --follow"
    )
)
def job() -> None:
    """Submit and watch jobs on Kubernetes (ElasticJobs).

    The cluster and the rights are those of KUBECONFIG. The operator must run there: see `remesh
    manifests`.
    """


@job.command(epilog=output.example("remesh job submit job.yaml"))
@click.argument("file")
@_namespace
def submit(*, file: str, namespace: str | None) -> None:
    """Submit the ElasticJob in a YAML file."""
    does, client = _client(namespace)
    key = does.submit(client, does.read_manifest(file, client.namespace))
    click.echo(f"job {key.name} is submitted to namespace {key.namespace}")


@job.command(epilog=output.example("remesh job status", "remesh job status train --json"))
@click.argument("name", required=False)
@_namespace
@output.json_option
def status(*, name: str | None, namespace: str | None, as_json: bool) -> None:
    """Show the state of a job, or list all jobs of the namespace.

    What the master alone knows (each rank, the history) is on its page: see docs/how-to/kubernetes.
    """
    does, client = _client(namespace)
    if name is None:
        found = does.jobs(client)
        if as_json:
            output.print_json({"jobs": [_data(each) for each in found]})
        else:
            _print_jobs(found)
        return
    one, pods = does.job(client, name), does.pods(client, name)
    if as_json:
        rows = [
            {"name": pod.name, "phase": pod.phase, "host": pod.host, "exit_code": pod.exit_code}
            for pod in pods
        ]
        output.print_json({**_data(one), "pods": rows})
    else:
        _print_job(one, pods)


def _data(found: Job) -> dict[str, Any]:
    return {
        "name": found.name,
        "namespace": found.namespace,
        "deleting": found.deleting,
        "status": msgspec.to_builtins(found.status),
    }


def _print_jobs(found: list[Job]) -> None:
    rows = [
        (
            each.status.phase.value,
            f"{each.status.replicas}/{each.spec.replicas}",
            _step(each),
            output.printable(each.name),
        )
        for each in found
    ]
    columns = ("<phase", ">workers", ">step", "<name")
    output.print_table(output.stdout_console(), columns, rows)


def _step(found: Job) -> str:
    training = found.status.training
    return "" if training is None or training.step is None else str(training.step)


def _print_job(found: Job, pods: list[Any]) -> None:
    now = found.status
    deleting = " (is being deleted)" if found.deleting else ""
    click.echo(f"{now.phase.value}{deleting}: {output.printable(now.reason)}")
    for condition in now.conditions:
        if condition.type == STALLED:
            click.echo(f"warning: {output.printable(condition.message)}")
    training = now.training
    facts = [
        ("workers", f"{now.replicas} of {found.spec.replicas} run"),
        ("replaced", f"{now.replacements} of {found.spec.max_replacements} are charged"),
    ]
    if training is not None:
        saved = "none" if training.saved_step is None else f"step {training.saved_step}"
        goodput = "not known" if training.goodput is None else f"{training.goodput:.1%}"
        facts += [
            ("round", str(training.round)),
            ("step", "none reported" if training.step is None else str(training.step)),
            ("newest checkpoint", saved),
            ("goodput", goodput),
        ]
    if now.memory is not None:
        facts.append(("memory of new workers", f"{now.memory >> 20} MiB"))
    for host in now.excluded_hosts:
        facts.append(("excluded host", output.printable(f"{host.host}: {host.reason}")))
    console = output.stdout_console()
    output.print_facts(console, facts)
    rows = [
        (
            pod.phase if pod.expires is None else "Terminating",
            "" if pod.exit_code is None else str(pod.exit_code),
            pod.host,
            output.printable(f"{pod.name} {pod.reason}".strip()),
        )
        for pod in pods
    ]
    output.print_table(console, ("<phase", ">exit code", "<host", "<pod"), rows)


@job.command(
    epilog=output.example("remesh job logs train --follow", "remesh job logs train --worker 3")
)
@click.argument("name")
@click.option("--worker", type=int, metavar="ID", help="This worker; that of rank 0 by default.")
@click.option("--master", is_flag=True, help="The master instead of a worker.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written from now on.")
@click.option("--tail", type=int, metavar="LINES", help="Only the last lines.")
@_namespace
def logs(
    *,
    name: str,
    worker: int | None,
    master: bool,
    follow: bool,
    tail: int | None,
    namespace: str | None,
) -> None:
    """Print the log of a job's pod: of the worker with rank 0, unless another is named."""
    does, client = _client(namespace)
    pod = does.choose_pod(does.pods(client, name), master=master, worker=worker)
    click.echo(f"{pod.name}:", err=True)
    for line in does.log_lines(client, pod, follow=follow, tail=tail):
        click.echo(line, nl=not line.endswith("\n"))


@job.command(epilog=output.example("remesh job errors train"))
@click.argument("name")
@_namespace
@output.json_option
def errors(*, name: str, namespace: str | None, as_json: bool) -> None:
    """Show the newest failures of a job: of its processes, root cause first, and of its pods."""
    does, client = _client(namespace)
    found = does.job(client, name).status.failures
    if as_json:
        output.print_json({"failures": msgspec.to_builtins(found)})
        return
    for each in found:
        click.echo(f"{each.time:%Y-%m-%d %H:%M:%S} {output.printable(each.where)}: {each.what}")
        for line in each.message.splitlines():
            click.echo(f"    {output.printable(line)}")
    if not found:
        click.echo("no failures are known", err=True)


@job.command(epilog=output.example("remesh job delete train", "remesh job delete train --wait 300"))
@click.argument("name")
@click.option(
    "--wait", default=0.0, metavar="SECONDS", help="Wait so long until nothing of it is left."
)
@_namespace
def delete(*, name: str, wait: float, namespace: str | None) -> None:
    """Delete a job: its workers save and stop, then its objects go. Checkpoints stay."""
    does, client = _client(namespace)
    gone = does.delete(client, name, wait_seconds=wait)
    click.echo(f"job {name} is {'deleted' if gone else 'being deleted'}")
    if wait and not gone:
        raise SystemExit(output.EXIT_USAGE)
