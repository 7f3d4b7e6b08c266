"""What the master must not forget: a journal that cannot be written, or is none."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from remesh.cli import cli
from remesh.elastic.job import JobState, Policy
from remesh.elastic.journal import Journal
from remesh.elastic.master import Connection, Master
from remesh.elastic.metrics import render_metrics
from remesh.elastic.nodes import Outcome, Settings
from remesh.elastic.protocol import Instruction, Waiting
from remesh.elastic.status import status_of
from remesh.errors import StorageError
from tests.elastic.agents import Clock, join_of

POLICY = Policy(heartbeat_timeout=600.0)


def after(number: int) -> JobState:
    """The job after so many events."""
    return JobState(policy=POLICY, num_checks=number, check_findings={0: "x" * 2000})


async def join(master: Master, number: int) -> None:
    shown: list[Instruction] = []
    master.on_message(
        Connection(number, shown.append, lambda: None),
        join_of(number, name="x" * 5000, settings=Settings(min_nodes=9, max_nodes=9)),
    )
    await master.written()
    assert isinstance(shown[-1].content, Waiting)


def loaded(path: Path) -> tuple[JobState, list[str]]:
    with closing(Journal(path)) as journal:
        return journal.load(POLICY)[0], journal.warnings


def fill_disk(patch: pytest.MonkeyPatch) -> None:
    """Let no file be written as a whole."""

    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr("remesh.elastic.journal.os.fsync", fail)


class TestFullDisk:
    def test_the_master_goes_on_says_so_and_writes_again(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock, file = Clock(), tmp_path / "journal"

        async def play() -> JobState:
            master = Master(POLICY, Journal(file), clock)
            await join(master, 0)
            assert not master.warnings
            fill_disk(monkeypatch)
            for number in (1, 2, 3):
                await join(master, number)
            (warning,) = master.warnings
            assert "No space left on device" in warning
            seen = status_of(master.job, master.live, clock(), master.warnings)
            assert seen.warnings == (warning,)
            text = render_metrics(seen, 1, journal_failing=not master.is_written).decode()
            assert "remesh_journal_failing 1.0" in text
            await master.written()
            assert not master.is_written  # the disk is still full
            monkeypatch.undo()
            await master.written()
            assert (master.is_written, master.warnings) == (True, ())
            await join(master, 4)
            await master.close()
            return master.job

        job = asyncio.run(play())
        assert loaded(file) == (job, [])
        errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert len(errors) == 1  # said once, not with every request
        assert "the journal is written again" in caplog.messages

    def test_a_journal_that_was_removed_is_made_again(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal")) as journal:
            (tmp_path / "journal").unlink()
            journal.write(after(1), 1.0)
        assert loaded(tmp_path / "journal") == (after(1), [])

    def test_a_master_starts_on_a_full_disk(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(Journal(tmp_path / "journal")) as journal:
            journal.write(after(1), 1.0)
        fill_disk(monkeypatch)
        assert loaded(tmp_path / "journal") == (after(1), [])


class TestKept:
    def test_the_newest_job_is_there_after_a_kill(self, tmp_path: Path) -> None:
        with closing(Journal(tmp_path / "journal")) as journal:
            assert journal.load(POLICY) == (JobState(policy=POLICY), 0.0)
            for number in range(3):
                journal.write(after(number), float(number))
                # What a master leaves that is killed now.
                shutil.copy(tmp_path / "journal", tmp_path / "left")
                (tmp_path / "left.new").write_text("half of the n")
                with closing(Journal(tmp_path / "left")) as left:
                    assert left.load(POLICY) == (after(number), float(number))
                    assert left.warnings == []

    def test_a_journal_behind_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        link = tmp_path / "journal"
        link.symlink_to(tmp_path / "disk" / "journal")
        (tmp_path / "disk" / "journal").touch(mode=0o600)
        with closing(Journal(link)) as journal:
            for number in range(3):
                journal.write(after(number), float(number))
        assert link.is_symlink()
        assert stat.S_IMODE(link.stat().st_mode) == 0o600
        assert loaded(link) == (after(2), [])

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "journal").touch()
        (warning,) = loaded(tmp_path / "journal")[1]
        assert "was empty: if it held a job's state, that is lost" in warning


ENDED = msgspec.structs.replace(
    after(0),
    ended=90.0,
    outcome=Outcome.FAILED,
    reason="no restart left",
)


class TestEnded:
    def test_a_master_says_at_once_that_it_goes_on_with_a_job_that_has_ended(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "journal"
        with closing(Journal(file)) as journal:
            journal.write(ENDED, 100.0)
        with closing(Journal(file)) as journal:
            master = Master(POLICY, journal, Clock())
        (warning,) = master.warnings
        assert warning.splitlines() == [
            f"{file}: holds a job that has ended (failed)",
            "no restart left",
            "For a new job give another file to --state, or remove this one",
        ]
        assert caplog.messages == [warning]


class TestWhatIsNoJournal:
    def test_a_directory_is_an_error_of_one_line(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(cli, ["master", "--port", "0", "--state", str(tmp_path)])
        assert done.exit_code == 2
        assert done.output.startswith(
            f"error: {tmp_path}: cannot be used as the master's journal ("
        )
        assert "Is a directory" in done.output

    def test_a_place_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match=r"cannot be used .*No such file or directory"):
            Journal(tmp_path / "missing" / "journal")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            pytest.param(
                '{"version": 9, "job": {"what": "nobody knows yet"}}',
                "written by a newer remesh",
                id="newer",
            ),
            pytest.param('{"version": 7}', "written by an older remesh", id="older"),
            pytest.param("on Monday\n" * 100, "is no journal of a master", id="another file"),
            pytest.param(
                '{"version": 8, "time": 1.0, "job": {"policy": 7}}',
                r"is damaged: .*\nMove it away",
                id="damaged",
            ),
        ],
    )
    def test_it_is_refused_and_left_as_it_is(self, tmp_path: Path, content: str, why: str) -> None:
        (tmp_path / "journal").write_text(content)
        with pytest.raises(StorageError, match=why):
            loaded(tmp_path / "journal")
        assert (tmp_path / "journal").read_text() == content
