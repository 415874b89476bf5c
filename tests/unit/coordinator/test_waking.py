"""What wakes the loop must never wait for the database: hints come from the API's event loop."""

from __future__ import annotations

import threading

from patience import PATIENCE_S
from trainmaster.server.coordinator.threads import LoopWaker


def test_hint_does_not_wait_for_a_database_that_hangs() -> None:
    asked, answer = threading.Event(), threading.Event()

    def hang() -> int:
        asked.set()
        answer.wait(PATIENCE_S)
        return 0

    alarm = LoopWaker(foreign_writes=hang, poll_s=60.0)
    woken: list[frozenset[str]] = []
    loop = threading.Thread(target=lambda: woken.append(alarm.wait()), daemon=True)
    loop.start()
    assert asked.wait(PATIENCE_S)
    hints = threading.Thread(target=lambda: (alarm.hint("a.1"), alarm.hint("b.1")), daemon=True)
    hints.start()
    hints.join(PATIENCE_S)
    assert not hints.is_alive()
    answer.set()
    loop.join(PATIENCE_S)
    assert woken == [frozenset({"a.1", "b.1"})]


def test_poll_that_is_due_sooner_ends_the_wait() -> None:
    alarm = LoopWaker(foreign_writes=lambda: 0, poll_s=600.0)
    assert alarm.wait(within_s=0.05) == frozenset()


def test_write_of_another_process_ends_the_wait() -> None:
    versions = iter([0, 0, 1])
    alarm = LoopWaker(foreign_writes=lambda: next(versions), poll_s=600.0, foreign_s=0.01)
    assert alarm.wait() == frozenset()
    assert next(versions, None) is None
