"""The jobs of a server: one without a name, or several, each with a name and a master of its own.

A job with a name is at the path `/jobs/NAME`, and begins when its first node joins. Its token is
made of its name and the server's token, so nothing has to be stored: it opens this job and no
other. Nothing but the server, its clock and its connections is shared by the jobs.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from remesh.elastic.hooks import report_exclusions
from remesh.elastic.job import Job
from remesh.elastic.journal import Journal
from remesh.elastic.master import TICK_SECONDS, Master, RequestError
from remesh.elastic.status import JobLine, phase_of
from remesh.errors import StorageError

SUFFIX = ".sqlite"
"""How the names of journals end."""
MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_name(name: str) -> bool:
    """Whether a job may have this name, which is part of a URL and of a file's name."""
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def job_token(token: str, name: str) -> str:
    """The token of one job.

    Args:
        token: The server's token.
        name: The job's name.
    """
    digest = hmac.new(token.encode(), f"remesh job {name}".encode(), hashlib.sha256)
    return f"{name}.{digest.hexdigest()}"


class Jobs:
    """The masters of a server.

    Args:
        masters: Those that are there from the start, by name.
        make: Makes the master of a further job; None: there are no others.

    Attributes:
        on_excluded: A command that is run for each node that is excluded (`hooks`).
    """

    def __init__(
        self, masters: Mapping[str, Master], make: Callable[[str], Master] | None = None
    ) -> None:
        self._masters = dict(masters)
        self._make = make
        self.on_excluded: str | None = None

    @classmethod
    def only(cls, master: Master) -> Jobs:
        """One job without a name."""
        return cls({"": master})

    @classmethod
    def in_directory(cls, directory: Path | None, make: Callable[[Journal], Master]) -> Jobs:
        """Jobs whose journals are in a directory.

        Args:
            directory: Where they are, and those of further jobs will be; None: in memory.
            make: Makes the master of a journal.

        Raises:
            StorageError: If one of them cannot be read, or the directory cannot be made.
        """
        try:
            if directory is not None:
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"{directory}: cannot be used as the directory of the jobs: {error}"
            ) from error

        def make_named(name: str) -> Master:
            place = ":memory:" if directory is None else directory / f"{name}{SUFFIX}"
            return make(Journal(place))

        files = [] if directory is None else sorted(directory.glob(f"*{SUFFIX}"))
        names = [file.name.removesuffix(SUFFIX) for file in files]
        return cls({name: make_named(name) for name in names if is_name(name)}, make_named)

    @property
    def are_named(self) -> bool:
        """Whether the jobs have names."""
        return self._make is not None

    @property
    def masters(self) -> Iterable[tuple[str, Master]]:
        """The names and masters of all jobs."""
        return self._masters.items()

    def get(self, name: str, *, begin: bool = False) -> Master:
        """The master of a job.

        Args:
            name: Its name.
            begin: Begin the job if there is none of this name.

        Raises:
            RequestError: If there is none.
            NotLeadingError: If another server may have taken over.
        """
        master = self._masters.get(name)
        if master is None and begin and self._make is not None and is_name(name):
            try:
                master = self._masters[name] = self._make(name)
            except StorageError as error:
                raise RequestError(503, f"job {name} cannot begin: {error}") from error
        if master is None:
            raise RequestError(
                404, f"there is no job {name!r}; it begins when its first node joins"
            )
        master.check_leads()
        return master

    def count_request(self, name: str) -> None:
        """Count a request to a job, if there is one of this name."""
        master = self._masters.get(name)
        if master is not None:
            master.num_requests += 1

    def lines(self) -> list[JobLine]:
        """All jobs, by name."""
        lines = []
        for name, master in sorted(self._masters.items()):
            master.check_leads()
            nodes, (phase, reason) = master.job.rendezvous, phase_of(master.job)
            line = JobLine(
                name=name,
                phase=phase,
                reason=reason,
                num_nodes=0 if nodes is None else len(nodes.active),
                step=master.live.progress.last_step,
                saved_step=master.job.saved_step,
            )
            lines.append(line)
        return lines

    def close_connection(self, number: int, *, by_peer: bool) -> None:
        """A connection was closed, by its other end or by this one."""
        for master in self._masters.values():
            master.close_connection(number, by_peer=by_peer)

    async def keep_time(self, *, end_with_job: bool = False) -> None:
        """Have the masters note several times a second that time passes, until cancelled.

        Args:
            end_with_job: Return when all jobs have ended and their agents have stopped sending.

        Raises:
            NotLeadingError: If another server may have taken over.
        """
        ending = asyncio.Event()
        telling = asyncio.create_task(self._tell_of_exclusions(ending))
        try:
            await self._keep_time(end_with_job=end_with_job)
        finally:
            ending.set()
            await telling

    async def _tell_of_exclusions(self, ending: asyncio.Event) -> None:
        def current() -> list[tuple[str, Job]]:
            return [(name, master.job) for name, master in self._masters.items()]

        if self.on_excluded is not None:
            await report_exclusions(current, self.on_excluded, ending)

    async def _keep_time(self, *, end_with_job: bool) -> None:
        loop = asyncio.get_running_loop()
        while not (end_with_job and all(master.is_over for master in self._masters.values())):
            due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            late, masters = loop.time() - due, list(self._masters.values())
            for master in masters:
                master.check_leads()
                master.tick(late)
            await asyncio.gather(*(master.written() for master in masters))

    async def close(self) -> None:
        """Write what is pending, and close the journals."""
        for master in self._masters.values():
            await master.close()
