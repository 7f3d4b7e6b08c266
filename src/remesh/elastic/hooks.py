"""Commands of the user's that the master runs when it excludes a node.

An exclusion is remembered by the job, and a scheduler does not hear of it: a command tells it. Each
exclusion runs the command once, one after the other, and again after a restart of the master, which
cannot know how far the command came: the command must not mind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable

from remesh.elastic.job import JobState

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Time between two looks at the job."""
FINISH_SECONDS = 5.0
"""How long a command that runs when the master ends has to finish, before it is killed."""


async def report_exclusions(
    current: Callable[[], JobState], command: str | None, ending: asyncio.Event
) -> None:
    """Run a command, if there is one, for each node that a job excludes, until the master ends.

    A command that runs when `ending` is set has `FINISH_SECONDS` to finish.
    """
    told: set[tuple[int, str]] = set()
    while command is not None and not ending.is_set():
        job = current()
        for node_id, (incarnation, reason) in job.rendezvous.excluded.items():
            if ending.is_set() or (node_id, incarnation) in told:
                continue
            told.add((node_id, incarnation))
            name = next((name for name, number in job.names.items() if number == node_id), "")
            what = {
                "REMESH_NODE": name,
                "REMESH_NODE_ID": str(node_id),
                "REMESH_REASON": reason,
            }
            await _run(command, what, name, ending)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await ending.wait()


async def _run(command: str, what: dict[str, str], name: str, ending: asyncio.Event) -> None:
    try:
        process = await asyncio.create_subprocess_shell(
            command,
            env=os.environ | what,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,  # what it prints must not be taken for the URL, which is on stdout
            start_new_session=True,  # so that all processes that it starts can be killed with it
        )
    except OSError as error:
        log.error("the command for the excluded node %s cannot be started: %s", name, error)
        return
    finished, is_ending = map(asyncio.ensure_future, (process.wait(), ending.wait()))
    await asyncio.wait({finished, is_ending}, return_when=asyncio.FIRST_COMPLETED)
    is_ending.cancel()
    await asyncio.wait({finished}, timeout=FINISH_SECONDS)
    if not finished.done():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    code = await finished
    if code:
        log.error("the command for the excluded node %s ended with code %d", name, code)
    else:
        log.info("the command for the excluded node %s has run", name)
