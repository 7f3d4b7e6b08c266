"""A master that is not alone: it stands by until it leads, then serves, and steps down.

It listens from the start. While another one leads it refuses requests, and clients turn to the next
address of their list. With the lease it takes the journals over (`shared_journals`), and is a
master like any other. When it loses the lease it closes its connections and stands by again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aiohttp import web

from remesh.elastic import connections
from remesh.elastic.jobs import Jobs
from remesh.elastic.lease import Leader, Leases, NotLeadingError
from remesh.elastic.server import ServerOptions, listening, serve, stands_by, url_of
from remesh.elastic.shared_journals import SharedJournals, TermsOfJournals

log = logging.getLogger(__name__)


class TermAuthority:
    """The authority of a master in a term of its lease.

    Args:
        leader: This instance's part in the election, which leads.
        journals: The journals of the masters.
    """

    def __init__(self, leader: Leader, journals: SharedJournals) -> None:
        self._leader = leader
        self._journals = journals
        self._term = leader.term

    def leads(self) -> bool:
        """Whether the master may act now."""
        return self._leader.leads() and self._leader.term == self._term

    def check(self) -> None:
        """Return if the holders of later terms see what was written before this call."""
        self._journals.check(self._term)


Make = Callable[[Path, TermAuthority], Jobs]
"""Makes the jobs that are served, with their journals in a directory."""


async def serve_in_turn(
    leases: Leases,
    directory: Path,
    me: str,
    seconds: float,
    options: ServerOptions,
    on_ready: Callable[[str], None],
    *,
    make: Make,
    end_with_job: bool = False,
) -> Jobs:
    """Stand by, and serve while this master leads, until this is cancelled.

    Args:
        leases: Reads and writes the lease.
        directory: Where the journals are, on storage that the masters share.
        me: The name of this master, which no other has.
        seconds: Silence of the leader after which another takes over.
        options: How it can be reached.
        on_ready: Is given its URL as soon as it listens, before it leads.
        make: Makes the jobs.
        end_with_job: Return when all jobs have ended and their agents have stopped sending.

    Returns:
        The jobs, which have ended.
    """
    journals = SharedJournals(directory)
    leader = Leader(TermsOfJournals(leases, journals), me, seconds)
    try:
        while True:
            options = await _stand_by(leader, options, on_ready)
            on_ready = _ignore
            log.info("this master leads, term %d", leader.term)
            async with _while_leading(leader):
                try:
                    authority = TermAuthority(leader, journals)
                    place = await asyncio.to_thread(journals.take_over, leader.term)
                    jobs = make(place, authority)
                    await serve(jobs, options, on_ready, end_with_job=end_with_job)
                except NotLeadingError as error:
                    log.warning("%s; it stands by", error)
                    leader.end_term()
                else:
                    return jobs
    finally:
        await leader.release()


def _ignore(_url: str) -> None:
    """The URL is known."""


@contextlib.asynccontextmanager
async def _while_leading(leader: Leader) -> AsyncIterator[None]:
    """Renew the lease meanwhile."""
    keeping = asyncio.create_task(leader.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _stand_by(
    leader: Leader, options: ServerOptions, on_ready: Callable[[str], None]
) -> ServerOptions:
    """Refuse requests until this master leads; the options with the port where it listens."""

    async def refuse(_request: web.Request) -> web.StreamResponse:
        return stands_by()

    def app(_listener: connections.Listener) -> web.Application:
        made = web.Application()
        made.router.add_route("*", "/{path:.*}", refuse)
        return made

    def forget(number: int, *, by_peer: bool) -> None:
        """No node is known yet."""

    async with listening(app, options, forget) as port:
        on_ready(url_of(options, port))
        await leader.acquire()
    return dataclasses.replace(options, port=port)
