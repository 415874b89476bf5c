"""Ids of jobs."""

from __future__ import annotations

import os

from trainmaster.server.core.commands import new_job_id


def test_forked_process_makes_ids_of_its_own() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, new_job_id().encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as theirs:
        assert theirs.read() != new_job_id()
    os.waitpid(child, 0)
