"""GPUs that a driver reports: the real NVML binding on a small driver library of our own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from local_servers import LocalServer, serving
from real_server import wait_for

# Two GPUs: the first whole, the second in MIG mode with slices at places 0 and 2. A slice is known by its handle.
DRIVER = r"""
#include <stdio.h>
#include <stdlib.h>

typedef long device;
enum { OK = 0, NOT_FOUND = 6, TIMEOUT = 10 };

/* A number that a test wrote into a file; 0 when there is none. */
static unsigned long long told(const char *name) {
    char path[512];
    unsigned long long value = 0;
    snprintf(path, sizeof path, "%s/%s", getenv("DRIVER_STATE") ? getenv("DRIVER_STATE") : ".", name);
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%llu", &value) != 1) value = 0;
        fclose(file);
    }
    return value;
}

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
int nvmlDeviceGetUUID(device d, char *text, unsigned size) {
    snprintf(text, size, d < 10 ? "GPU-%ld" : "MIG-%ld", d);
    return OK;
}
struct event { device d; unsigned long long type, data; unsigned gpu, compute; };
int nvmlEventSetCreate(long *set) { *set = 1; return OK; }
int nvmlDeviceRegisterEvents(device d, unsigned long long types, long set) { return OK; }
int nvmlEventSetWait_v2(long set, struct event *found, unsigned timeout_ms) {
    static unsigned long long last = 0;
    unsigned long long xid = told("xid");
    if (xid == last) return TIMEOUT;
    last = xid;
    found->d = 1;
    found->data = xid;
    return OK;
}
int nvmlDeviceGetTotalEccErrors(device d, unsigned kind, unsigned counter, unsigned long long *count) {
    *count = d == 1 ? told("ecc") : 0;
    return OK;
}
int nvmlDeviceGetRemappedRows(device d, unsigned *corrected, unsigned *rest, unsigned *pending, unsigned *failed) {
    *corrected = *rest = *failed = 0;
    *pending = d == 1 ? (unsigned)told("rows") : 0;
    return OK;
}
int nvmlDeviceGetName(device d, char *text, unsigned size) {
    snprintf(text, size, d < 10 ? "NVIDIA H100 80GB HBM3" : "NVIDIA A100-SXM4-40GB MIG 1g.5gb");
    return OK;
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(device d, struct memory *memory) {
    memory->total = (d < 10 ? 81559ULL : 4864ULL) << 20;
    memory->used = (d == 1 ? told("used_mb") : 0) << 20;
    memory->free = memory->total - memory->used;
    return OK;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library is, and what it is told."""
    if shutil.which("gcc") is None:
        pytest.skip("no compiler to make a driver library with")
    place = tmp_path_factory.mktemp("driver")
    (place / "driver.c").write_text(DRIVER)
    library = place / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, place / "driver.c"], check=True)
    return place


@pytest.fixture(scope="module")
def shared_server(driver: Path) -> Iterator[LocalServer]:
    with serving(driver / "data", "files", LD_LIBRARY_PATH=str(driver), DRIVER_STATE=str(driver)) as server:
        yield server


def test_gpus_and_slices_of_the_driver_are_listed_and_handed_out(server: LocalServer) -> None:
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


def test_gpu_whose_memory_is_not_free_after_a_job_leaves_the_pool_until_it_is(
    server: LocalServer, driver: Path
) -> None:
    leaves_memory = ["sh", "-c", f"echo 70000 > {driver}/used_mb"]
    wants = {"gpu_count": 1, "gpu_type": "H100"}
    first = server.submit(*leaves_memory, resource_config=wants)
    assert server.until(first)["status"] == "COMPLETED"
    second = server.submit("true", resource_config=wants)
    (node,) = server.data("GET", "/v1/nodes")["nodes"]
    assert [gpu["healthy"] for gpu in node["gpus"]] == [False, True, True]
    assert server.data("GET", f"/v1/jobs/{second}")["status"] == "QUEUED"
    (driver / "used_mb").write_text("0")
    assert server.until(second)["status"] == "COMPLETED"
    told = server.data("GET", f"/v1/nodes/{node['id']}/events")["events"]
    assert [event["type"] for event in told] == ["gpu_healthy", "gpu_unhealthy"]
    assert "70000 MB" in told[1]["message"]


ASKS = """
import json, sys
from trainmaster.backends.local.inventory import Driver
driver = Driver()
for line in sys.stdin:
    gpu = driver.gpus()[0]
    print(json.dumps([gpu.healthy, gpu.problem, gpu.used_mb]), flush=True)
"""


def test_errors_of_a_gpu_take_it_out_of_the_pool(driver: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "DRIVER_STATE": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", ASKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as asks:
        assert asks.stdin is not None
        assert asks.stdout is not None

        def report(name: str, value: int) -> tuple[bool, str]:
            (tmp_path / name).write_text(str(value))
            asks.stdin.write("again\n")
            asks.stdin.flush()
            healthy, problem, _ = json.loads(asks.stdout.readline())
            return healthy, problem

        assert report("used_mb", 5) == (True, "")
        assert report("ecc", 2) == (False, "2 uncorrected ECC errors since the driver was loaded: reset it")
        assert report("ecc", 0) == (True, "")
        assert report("rows", 1) == (False, "rows of its memory wait to be remapped: reset it")
        assert report("rows", 0) == (True, "")
        assert report("xid", 31) == (True, "")  # a program's own mistake
        assert report("xid", 79) == (False, "Xid 79: reset it, then restart the server")
        assert report("xid", 31)[0] is False  # it stays out
        asks.stdin.close()
