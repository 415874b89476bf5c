"""A leader that makes no progress lets somebody else lead."""

from __future__ import annotations

from pathlib import Path

from real_server import wait_for
from trainmaster.server.coordinator.leadership import Leadership
from trainmaster.server.store.database import Database


def test_stuck_leader_gives_the_lead_to_a_standby(tmp_path: Path) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'tm.db'}")
    made = [
        Leadership(
            database,
            holder=name,
            url="",
            lease_s=0.5,
            on_change=lambda: None,
            patience_s=patience_s,
        )
        for name, patience_s in (("stuck", 0.5), ("standby", 60.0))
    ]
    stuck, standby = made
    stuck.start()
    wait_for(lambda: stuck.epoch is not None, "the first to lead")
    standby.start()
    wait_for(lambda: standby.epoch is not None, "the standby to lead")
    assert stuck.epoch is None
    for leadership in made:
        leadership.stop()
    database.close()
