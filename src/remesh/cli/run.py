"""`remesh run` and `remesh check`: training on nodes that may come and go."""

from __future__ import annotations

import importlib.util
import sys

import click

from remesh.cli import output


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
    epilog=output.example(
        "remesh run --nproc-per-node 4 train.py",
        "remesh run --nnodes 2:4 --master http://head:29400 --nproc-per-node 8 train.py",
    ),
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS] SCRIPT [ARGS]...")
def run(*, arguments: tuple[str, ...]) -> None:
    """Run a training script as one node of a job that survives failures.

    Takes torchrun's options and some of its own; `remesh run --help` lists them. Without `--master`
    the job has this machine only, and its master runs inside this command.
    """
    if {"-h", "--help"} & {*arguments} and importlib.util.find_spec("torch") is None:
        click.echo(click.get_current_context().get_help())  # the list of options is torchrun's
        return
    if sys.platform != "linux":
        raise click.ClickException(
            "remesh run needs Linux; save, load, convert and the other commands work here too"
        )
    with output.needs("remesh run", "elastic,torch"):
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from remesh.elastic import launch
    try:
        launch.main(arguments)
    except ChildFailedError as error:
        click.echo(str(error), err=True)
        raise SystemExit(1) from error  # the script's fault, as docs/elastic.md says


@click.command(
    epilog=output.example("remesh check", "remesh check --master http://127.0.0.1:29400")
)
@click.option("--master", metavar="URL", help="Have all nodes of this master's job tested.")
@click.option("--token-file", metavar="FILE", help="The master's token.")
@click.option("--tls-ca", metavar="FILE", help="Trust certificates signed by this one.")
@output.json_option
def check(*, master: str | None, token_file: str | None, tls_ca: str | None, as_json: bool) -> None:
    """Test this machine: its processors, memory and GPUs.

    With `--master`, all nodes of a job are tested in groups before its next round instead; what was
    found is seen with `remesh status`.
    """
    if master is not None:
        from remesh.elastic.client import Client, read_token

        client = Client(master, token=read_token(token_file), tls_ca=tls_ca)
        client.request_check("remesh check")
        output.line("the nodes will be tested before the next round")
        return
    from remesh.elastic.node_check import run_alone

    outcome = run_alone()
    if as_json:
        output.print_json(
            {
                "passed": outcome.passed,
                "seconds": outcome.seconds,
                "message": outcome.message,
            }
        )
    elif outcome.passed:
        output.line(f"healthy: the probe took {outcome.seconds:.1f} s")
    else:
        output.line(*f"faulty: {outcome.message}".splitlines())
    if not outcome.passed:
        raise SystemExit(output.EXIT_DAMAGED)
