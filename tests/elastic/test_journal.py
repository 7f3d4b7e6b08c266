"""What the master must not forget: a journal that cannot be written, or is none."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic.job import Job, Policy
from remesh.elastic.journal import Journal
from remesh.elastic.master import RETRY_SECONDS, Master, Session
from remesh.elastic.metrics import render_metrics
from remesh.elastic.protocol import Instruction, Join, Waiting
from remesh.elastic.rendezvous import Settings
from remesh.elastic.status import status_of
from remesh.errors import StorageError

POLICY = Policy(heartbeat_timeout=600.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def after(number: int) -> Job:
    """The job after so many events."""
    return Job(policy=POLICY, num_checks=number, check_reason="x" * 2000)


async def join(master: Master, number: int) -> None:
    shown: list[Instruction] = []
    master.on_message(
        Session(number, shown.append, lambda: None),
        Join(
            name=f"host-{number}" + "x" * 5000,
            node_id=number,
            incarnation=str(number),
            address="x",
            num_processes=1,
            after_round=0,
            settings=Settings(min_nodes=9, max_nodes=9),
        ),
    )
    await master.written()
    assert isinstance(shown[-1].content, Waiting)


def loaded(path: Path) -> tuple[Job, list[str]]:
    with closing(Journal(path)) as journal:
        return journal.load(POLICY)[0], journal.warnings


def fill_disk(journal: Journal, *, full: bool) -> None:
    """Let SQLite find the disk full, as far as this journal is concerned."""
    pages = 1 if full else 1 << 30  # never fewer than there are
    journal._database.execute(f"pragma max_page_count={pages}").fetchone()


def remove_all(directory: Path) -> None:
    for leftover in directory.iterdir():
        leftover.unlink()


class TestFullDisk:
    def test_the_master_goes_on_says_so_and_writes_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock, file = Clock(), tmp_path / "journal"
        journal = Journal(file)

        async def play() -> Job:
            master = Master(POLICY, journal, clock)
            await join(master, 0)
            assert not master.warnings
            fill_disk(journal, full=True)
            for number in (1, 2, 3):
                await join(master, number)
            (warning,) = master.warnings
            assert "database or disk is full" in warning
            seen = status_of(master.job, master.live, clock(), master.warnings)
            assert seen.warnings == (warning,)
            text = render_metrics(seen, 1, journal_failing=not master.is_written).decode()
            assert "remesh_journal_failing 1.0" in text
            clock.now += RETRY_SECONDS
            await master.written()
            assert not master.is_written  # the disk is still full
            fill_disk(journal, full=False)
            await master.written()
            assert not master.is_written  # it is not tried at every request
            clock.now += RETRY_SECONDS
            await master.written()
            assert (master.is_written, master.warnings) == (True, ())
            await join(master, 4)
            await master.close()
            return master.job

        job = asyncio.run(play())
        assert loaded(file) == (job, [])
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1  # said once, not with every request
        assert "the journal is written again, after 2 s" in caplog.messages

    def test_a_journal_that_was_removed_is_made_again(self, tmp_path: Path) -> None:
        clock, file = Clock(), tmp_path / "journal"

        async def play() -> Job:
            master = Master(POLICY, Journal(file), clock)
            await join(master, 0)
            remove_all(tmp_path)
            await join(master, 1)
            assert "was removed while the master runs" in master.warnings[0]
            clock.now += RETRY_SECONDS
            await join(master, 2)
            assert master.warnings == ()
            await join(master, 3)
            await master.close()
            return master.job

        job = asyncio.run(play())
        assert loaded(file) == (job, [])

    def test_the_file_of_another_master_is_left_alone(self, tmp_path: Path) -> None:
        clock, file = Clock(), tmp_path / "journal"

        async def play() -> None:
            master = Master(POLICY, Journal(file), clock)
            await join(master, 0)
            remove_all(tmp_path)
            file.write_text("mine")
            for number in (1, 2):
                await join(master, number)
                clock.now += RETRY_SECONDS
            assert not master.is_written
            await master.close()

        asyncio.run(play())
        assert file.read_text() == "mine"


class TestKept:
    def test_the_newest_job_is_there_after_a_kill(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal")) as journal:
            assert journal.load(POLICY) == (Job(policy=POLICY), 0.0)
            for number in range(3):
                journal.write(after(number), float(number))
                # What a master leaves that is killed now.
                for name in ("journal", "journal-wal"):
                    shutil.copy(tmp_path / name, tmp_path / name.replace("journal", "left"))
                with closing(Journal(tmp_path / "left")) as left:
                    assert left.load(POLICY) == (after(number), float(number))
                    assert left.warnings == []

    def test_a_journal_behind_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        link = tmp_path / "journal"
        link.symlink_to(tmp_path / "disk" / "journal")
        with closing(Journal(link)) as journal:
            for number in range(3):
                journal.write(after(number), float(number))
        assert loaded(link) == (after(2), [])

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "journal").touch()
        (warning,) = loaded(tmp_path / "journal")[1]
        assert "was empty: if it held a job's state, that is lost" in warning


class TestWhatIsNoJournal:
    def test_a_directory_is_an_error_of_one_line(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(cli, ["master", "--port", "0", "--state", str(tmp_path)])
        assert (done.exit_code, done.output) == (
            2,
            f"error: {tmp_path} is a directory; the journal needs a file\n",
        )

    def test_a_place_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="unable to open database file"):
            Journal(tmp_path / "missing" / "journal")

    @pytest.mark.parametrize(("version", "age"), [(3, "an older"), (5, "a newer")])
    def test_one_of_another_version(self, tmp_path: Path, version: int, age: str) -> None:
        file = tmp_path / "journal"
        Journal(file).close()
        with closing(sqlite3.connect(file)) as database:
            database.execute("update about set version = ?", (version,))
            database.commit()
        with pytest.raises(StorageError, match=f"written by {age} remesh"):
            Journal(file)

    def test_another_file(self, tmp_path: Path) -> None:
        (tmp_path / "notes").write_text("what I did on Monday\n" * 100)
        with pytest.raises(StorageError, match="file is not a database"):
            Journal(tmp_path / "notes")

    def test_a_damaged_one(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal")) as journal:
            journal.write(after(1), 1.0)
        with closing(sqlite3.connect(tmp_path / "journal")) as database:
            database.execute("update job set state = substr(state, 1, 100)")
            database.commit()
        with pytest.raises(StorageError, match=r"journal is damaged: .*\nMove it away"):
            loaded(tmp_path / "journal")
