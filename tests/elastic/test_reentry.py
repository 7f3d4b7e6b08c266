"""The next act of a process, given the newest order that it knows."""

from __future__ import annotations

from remesh.elastic.reentry import Act, EnterWorld, LeaveWorld, Report, next_act


def test_an_order_is_carried_out_once() -> None:
    inside = Report(pid=1)
    assert next_act(inside, None) is Act.GO_ON
    assert next_act(inside, LeaveWorld(1)) is Act.LEAVE
    out = Report(pid=1, number=1, is_out=True)
    assert next_act(out, LeaveWorld(1)) is Act.GO_ON
    assert next_act(out, EnterWorld(1, {})) is Act.GO_ON
    assert next_act(out, EnterWorld(2, {})) is Act.ENTER
    assert next_act(out, LeaveWorld(2)) is Act.CONFIRM
    assert next_act(Report(pid=1, number=2), EnterWorld(2, {})) is Act.GO_ON


def test_a_process_that_missed_the_order_to_leave_leaves_before_it_enters() -> None:
    assert next_act(Report(pid=1, number=2), EnterWorld(4, {})) is Act.LEAVE


def test_a_process_that_lost_a_peer_confirms_the_order_it_waited_for() -> None:
    assert (
        next_act(Report(pid=1, is_out=True, error="connection closed"), LeaveWorld(1))
        is Act.CONFIRM
    )
