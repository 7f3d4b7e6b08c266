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
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        from remesh.elastic import launch
    try:
        launch.main(arguments)
    except ChildFailedError as error:
        click.echo(str(error), err=True)
        raise SystemExit(1) from error  # the script's fault, as docs/elastic.md says
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from error


@click.command(epilog=output.example("remesh check"))
@output.json_option
def check(*, as_json: bool) -> None:
    """Test this machine: its processors, memory and GPUs."""
    from remesh.elastic.node_check import run_alone

    outcome = run_alone()
    if as_json:
        output.print_json(
            {
                "passed": outcome.passed,
                "seconds": outcome.elapsed,
                "message": outcome.message,
            }
        )
    elif outcome.passed:
        output.line(f"healthy: the test took {outcome.elapsed:.1f} s")
    else:
        output.line(*f"faulty: {outcome.message}".splitlines())
    if not outcome.passed:
        raise SystemExit(output.EXIT_DAMAGED)
