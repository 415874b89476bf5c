"""What a process that reads or writes a table may take of the machine."""

from __future__ import annotations

import math
import resource

from trainmaster.server.core.resources import quantity


def limit(cpu: str | None, memory: str | None) -> None:
    """Hold this process to a number of threads and to an amount of memory, where they are given."""
    if cpu is not None:
        import pyarrow as pa

        threads = max(1, math.ceil(quantity(cpu)))
        pa.set_cpu_count(threads)
        pa.set_io_thread_count(threads)
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    wanted = most if memory is None else int(quantity(memory))  # what was inherited is another process's
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))
