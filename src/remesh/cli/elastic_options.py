"""Options that the commands of the control plane share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from remesh.elastic.job import HangAction, Policy


def read_token(path: str | None) -> str:
    """The token in a file, without the white space around it; empty without a file.

    Raises:
        ClickException: If the file cannot be read or is empty.
    """
    if path is None:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise click.ClickException(f"the token cannot be read: {error}") from error
    if not token:
        raise click.ClickException(f"{path} holds no token")
    return token


_POLICY_OPTIONS = (
    click.option(
        "--heartbeat-timeout",
        default=10.0,
        show_default=True,
        help="Seconds of silence after which a node is lost.",
    ),
    click.option("--check/--no-check", default=False, help="Test nodes before they train."),
    click.option("--exclude-stragglers", is_flag=True, help="Do without slow nodes if possible."),
    click.option(
        "--save-grace",
        default=60.0,
        show_default=True,
        help="Seconds that a growing job waits for a checkpoint.",
    ),
    click.option(
        "--hang-timeout", type=float, help="Seconds without a step after which a job hangs."
    ),
    click.option(
        "--hang-action",
        type=click.Choice([action.value for action in HangAction]),
        default=HangAction.RESTART.value,
        show_default=True,
        help="What happens to a job that hangs.",
    ),
)


def policy_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a `Policy`, which it receives as `policy`."""

    @functools.wraps(command)
    def with_policy(
        *,
        heartbeat_timeout: float,
        check: bool,
        exclude_stragglers: bool,
        save_grace: float,
        hang_timeout: float | None,
        hang_action: str,
        **others: Any,
    ) -> Any:
        policy = Policy(
            heartbeat_timeout=heartbeat_timeout,
            check=check,
            exclude_stragglers=exclude_stragglers,
            save_grace=save_grace,
            hang_timeout=hang_timeout,
            hang_action=HangAction(hang_action),
        )
        return command(policy=policy, **others)

    for option in reversed(_POLICY_OPTIONS):
        with_policy = option(with_policy)
    return with_policy
