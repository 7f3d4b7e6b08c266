"""Requests for saves: what a rank hears of them, and when they are answered."""

import contextlib
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from remesh.elastic.process_socket import ProcessSockets
from remesh.training.policies import OnRequest, OnSignals
from remesh.training.watch import Watch


@pytest.fixture
def ask(tmp_path: Path) -> Path:
    return tmp_path / "ask"


@pytest.fixture
def watch(ask: Path) -> Watch:
    return Watch([OnRequest(str(ask))], "")


def test_a_file_read_while_it_is_written_asks_for_what_is_written(watch: Watch, ask: Path) -> None:
    with ask.open("w") as file:
        assert watch.asked() == ("", None)
        file.write("save-and-stop")
    assert watch.asked() == (f"request in {ask}", "save-and-stop")


@pytest.mark.parametrize("first", [None, "save"])
def test_what_is_asked_for_while_a_save_begins_is_not_taken_for_answered(
    watch: Watch, ask: Path, first: str | None
) -> None:
    if first:
        ask.write_text(first)
    assert watch.asked()[1] == first
    ask.write_text("save-and-stop")
    watch.answered()
    assert watch.asked() == (f"request in {ask}", "save-and-stop")
    watch.answered()
    assert not ask.exists()


def test_a_signal_that_comes_while_a_save_begins_is_not_taken_for_answered() -> None:
    watch = Watch([OnSignals((signal.SIGUSR1,))], "")
    try:
        assert watch.asked() == ("", None)
        os.kill(os.getpid(), signal.SIGUSR1)
        watch.answered()  # a save because of the step
        assert watch.asked() == ("signal SIGUSR1", "save-and-stop")
        watch.answered()
        assert watch.asked() == ("", None)
    finally:
        watch.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_ends_by_a_signal_as_it_would_without_a_manager() -> None:
    forking = multiprocessing.get_context("fork")
    runs = forking.Event()

    def sleep() -> None:
        runs.set()
        time.sleep(60)

    with contextlib.closing(Watch([OnSignals()], "")) as watch:
        helper = forking.Process(target=sleep)
        helper.start()
        assert runs.wait(60)
        helper.terminate()
        helper.join(30)
        helper.kill()
        helper.join()
        assert helper.exitcode == -signal.SIGTERM
        assert watch.asked() == ("", None)


def test_a_request_to_wait_needs_no_save_if_the_memory_is_as_good(tmp_path: Path) -> None:
    with contextlib.closing(ProcessSockets(str(tmp_path), 1)) as agent:
        watch = Watch([], agent.path_of(0))
        agent.take()
        agent.request("hold")
        assert watch.asked() == ("request of the agent", "save-and-hold")
        # The save in flight goes on.
        assert watch.asked(holds_state=True, is_saving=True) == ("", None)
        assert watch.asked(holds_state=True) == ("", "hold")
        assert watch.wanted() == "hold"
        agent.request(None)
        assert watch.asked() == ("", None)
        watch.close()
