"""What is summed up of a node's processes."""

from __future__ import annotations

from pathlib import Path

from trainmaster.worker import cgroups


def test_what_is_swapped_out_counts_from_the_first_look_on(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Name:\tVmRSS: 7 kB\nVmPeak:\t   90000 kB\nVmRSS:\t    2048 kB\nRssAnon:\t 1 kB\nVmSwap:\t 1024 kB\n"
    )
    assert cgroups._sum_mb(str(status), cgroups._RESIDENT) == 3
    assert cgroups._sum_mb(str(tmp_path / "gone"), cgroups._RESIDENT) == 0
