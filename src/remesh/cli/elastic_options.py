"""Options that the commands of the control plane share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from remesh.elastic.failures import read_patterns
from remesh.elastic.job import HangAction, Policy
from remesh.elastic.protocol import HEARTBEAT_TIMEOUT

_POLICY_OPTIONS = (
    click.option(
        "--heartbeat-timeout",
        default=HEARTBEAT_TIMEOUT,
        show_default=True,
        help="Seconds of silence after which a node is lost.",
    ),
    click.option("--check", is_flag=True, help="Test nodes before they train."),
    click.option(
        "--check-timeout",
        default=120.0,
        show_default=True,
        help="Seconds within which a test must be over.",
    ),
    click.option("--exclude-stragglers", is_flag=True, help="Do without slow nodes if possible."),
    click.option(
        "--save-grace",
        default=60.0,
        show_default=True,
        help="Seconds that a growing job waits for a checkpoint.",
    ),
    click.option(
        "--hang-timeout",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Without a step for so long, a job hangs; 0: never. By default this follows from its "
        "steps, and is an hour at least.",
    ),
    click.option(
        "--hang-action",
        type=click.Choice([action.value for action in HangAction]),
        default=HangAction.RESTART.value,
        show_default=True,
        help="What happens to a job that hangs.",
    ),
    click.option(
        "--restart-refill",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        help="Give a node one charged restart back every so many seconds.",
    ),
    click.option(
        "--failure-patterns", metavar="FILE", help="JSON that tells kinds of failures apart."
    ),
)


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a `Policy`, which it receives as `policy`."""

    @functools.wraps(command)
    def with_policy(
        *,
        heartbeat_timeout: float,
        check: bool,
        check_timeout: float,
        exclude_stragglers: bool,
        save_grace: float,
        hang_timeout: float | None,
        hang_action: str,
        restart_refill: float | None,
        failure_patterns: str | None,
        **others: Any,
    ) -> Any:
        policy = Policy(
            heartbeat_timeout=heartbeat_timeout,
            check=check,
            check_timeout=check_timeout,
            exclude_stragglers=exclude_stragglers,
            save_grace=save_grace,
            hang_timeout=hang_timeout,
            hang_action=HangAction(hang_action),
            restart_refill=restart_refill,
            patterns=read_patterns(failure_patterns),
        )
        return command(policy=policy, **others)

    for option in reversed(_POLICY_OPTIONS):
        with_policy = option(with_policy)
    return with_policy
