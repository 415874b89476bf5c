"""GPUs that a driver reports: the real NVML binding on a small driver library of our own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from local_servers import serving

from real_server import wait_for

# Two GPUs: the first whole, the second in MIG mode with slices at places 0 and 2. A slice is known by its handle.
DRIVER = r"""
#include <stdio.h>

typedef long device;
enum { OK = 0, NOT_FOUND = 6 };

int nvmlInitWithFlags(unsigned flags) { return OK; }
int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int result) { return result ? "not found" : "success"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *found) { *found = index + 1; return OK; }
int nvmlDeviceGetMigMode(device d, unsigned *current, unsigned *pending) {
    *current = *pending = d == 2;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(device d, unsigned *count) { *count = 4; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device d, unsigned index, device *found) {
    if (index % 2) return NOT_FOUND;
    *found = 10 + index;
    return OK;
}
int nvmlDeviceGetUUID(device d, char *text, unsigned size) { snprintf(text, size, "MIG-%ld", d); return OK; }
int nvmlDeviceGetName(device d, char *text, unsigned size) {
    snprintf(text, size, d < 10 ? "NVIDIA H100 80GB HBM3" : "NVIDIA A100-SXM4-40GB MIG 1g.5gb");
    return OK;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(device d, struct memory *memory) {
    memory->total = memory->free = (d < 10 ? 81559ULL : 4864ULL) << 20;
    memory->used = 0;
    return OK;
}
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no compiler to make a driver library with")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    return tmp_path


def test_gpus_and_slices_of_the_driver_are_listed_and_handed_out(driver: Path) -> None:
    with serving(driver / "data", "files", LD_LIBRARY_PATH=str(driver)) as server:
        (node,) = wait_for(lambda: server.data("GET", "/v1/nodes")["nodes"], "the inventory")
        assert [(gpu["index"], gpu["type"], gpu["memory_mb"]) for gpu in node["gpus"]] == [
            (0, "NVIDIA H100 80GB HBM3", 81559),
            (1, "mig-1g.5gb", 4864),
            (2, "mig-1g.5gb", 4864),
        ]
        shows = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
        by_type = {
            kind: server.submit(*shows, resource_config={"gpu_type": kind, **more})
            for kind, more in (
                ("H100", {"gpu_count": 1}),
                ("mig-1g.5gb", {"gpu_count": 2}),
            )
        }
        for job_id in by_type.values():
            assert server.until(job_id)["status"] == "COMPLETED"
        assert server.lines(by_type["H100"]) == ["0"]
        assert server.lines(by_type["mig-1g.5gb"]) == ["MIG-10,MIG-12"]
