"""What the launcher says about a process."""

from __future__ import annotations

import pytest

from remesh.run_info import RunInfo, run_info


def test_a_process_without_a_launcher_is_a_job_of_one() -> None:
    assert run_info({}) == RunInfo()


def test_torchrun_names_are_read() -> None:
    info = run_info(
        {
            "TORCHELASTIC_RUN_ID": "job",
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "REMESH_AGENT_SOCKET": "/run/0.socket",
        }
    )
    assert info == RunInfo("job", 5, 1, 8, 4, 2, "/run/0.socket")


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(ValueError, match="RANK should be a whole number, but is 'two'"):
        run_info({"RANK": "two"})
