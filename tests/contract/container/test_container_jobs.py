"""Jobs in containers: their images, limits, volumes and labels, and what only engines do."""

from __future__ import annotations

import os
import subprocess

import pytest

from container_engine import plain_image
from container_servers import ContainerServer
from real_server import wait_for

SLEEP = ("python3", "-c", "import time; print('up', flush=True); time.sleep(600)")


def test_a_command_runs_in_its_image_and_its_logs_outlive_the_container(container_server: ContainerServer) -> None:
    server = container_server
    script = (
        "import os, sys, trainmaster.jobs\n"
        "print(os.environ['FROM_IMAGE'], os.environ['TOKEN'], os.getpid() < 100, flush=True)\n"
        "print(os.path.exists('/work') or os.path.exists('/opt'), file=sys.stderr)\n"
        "sys.exit(7)"
    )
    job_id = server.run("python3", "-c", script, workload={"environment": {"TOKEN": "word"}, "image": server.image})
    job = server.until(job_id)
    assert (job["status"], job["error"]["error_type"], job["error"]["exit_code"]) == ("FAILED", "EXITED_NONZERO", 7)
    server.wait_until_cleared(job_id)
    assert set(server.lines(job_id)) == {"yes word True", "False"}
    assert job["backend"] == "container"


def test_what_is_booked_is_all_that_a_container_gets(container_server: ContainerServer) -> None:
    server = container_server
    script = (
        "import os\n"
        "shm = os.statvfs('/dev/shm'); print('shm', shm.f_blocks * shm.f_frsize >> 20, flush=True)\n"
        "from pathlib import Path\n"
        "pids = next(Path('/sys/fs/cgroup').rglob('pids.max')); print('pids', pids.read_text().strip(), flush=True)\n"
        "held = [bytearray(16 << 20) for _ in range(64)]"
    )
    resources = {"cpu_cores": 1, "ram_min_mb": 256}
    job_id = server.run(
        "python3", "-c", script, resources=resources, workload={"container": {"shm_mb": 48, "pids": 77}}
    )
    job = server.until(job_id)
    assert (job["status"], job["error"]["error_type"]) == ("FAILED", "OUT_OF_MEMORY")
    assert server.lines(job_id) == ["shm 48", "pids 77"]


def test_only_what_the_kernel_killed_for_want_of_memory_was_out_of_memory(container_server: ContainerServer) -> None:
    server = container_server
    plain, limited = plain_image(server.engine), {"ram_min_mb": 64}
    growing = "held = [bytearray(8 << 20) for _ in range(64)]"
    # The kernel takes the worker first, and the container with it.
    sparing = f"open('/proc/1/oom_score_adj', 'w').write('1000'); {growing}"
    cases = [
        (("bash", "-c", "x=xxxxxxxx; while :; do x=$x$x; done"), plain, "OUT_OF_MEMORY"),
        (("sh", "-c", "exit 137"), plain, "KILLED_BY_SIGNAL"),
        (("python3", "-c", growing), server.image, "OUT_OF_MEMORY"),
        (("python3", "-c", sparing), server.image, "OUT_OF_MEMORY"),
        (("python3", "-c", "import os; os.kill(os.getpid(), 9)"), server.image, "KILLED_BY_SIGNAL"),
    ]
    jobs = [server.run(*argv, workload={"image": image}, resources=limited) for argv, image, _ in cases]
    ends = [server.until(job_id)["error"]["error_type"] for job_id in jobs]
    assert ends == [reason for _, _, reason in cases]


def test_volumes_are_seen_inside_and_kept_to_the_data_roots(container_server: ContainerServer) -> None:
    server = container_server
    shown = server.home / "shown"
    shown.mkdir()
    (shown / "given.txt").write_text("given")
    script = (
        "from pathlib import Path\n"
        "print(Path('/seen/given.txt').read_text())\n"
        "Path('/seen/made.txt').write_text('made'); Path('/kept/made.txt').write_text('made')\n"
        "for path in ('/only/x', '/only/below/x'):\n"
        "    try: Path(path).write_text('x')\n"
        "    except OSError as error: print(error.strerror)"
    )
    volumes = [
        {"source": str(shown), "target": "/seen"},
        {"source": str(shown), "target": "/only", "read_only": True},
        {"source": "kept", "target": "/kept"},
    ]
    below = shown / "below"
    below.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", below], check=True)
    try:
        job_id = server.run("python3", "-c", script, workload={"volumes": volumes})
        assert server.until(job_id)["status"] == "COMPLETED"
        assert server.lines(job_id) == ["given", "Read-only file system", "Read-only file system"]
        assert os.listdir(below) == []
    finally:
        subprocess.run(["umount", below], check=True)
    assert (shown / "made.txt").read_text() == "made"
    server.wait_until_cleared(job_id)
    (kept,) = server.engine.podman("volume", "ls", "--filter", "name=-kept$", "--format", "{{.Name}}").split()
    server.engine.podman("volume", "rm", kept)

    for source, word in (("/etc", "outside"), (str(server.home), "its own state")):
        job = server.until(server.run("true", workload={"volumes": [{"source": source, "target": "/x"}]}))
        assert job["status"] == "FAILED"
        assert word in job["error"]["error_message"]


def test_the_images_own_command_runs_where_none_is_named(container_server: ContainerServer) -> None:
    server = container_server
    workload = {"kind": "container", "image": server.image}
    job_id = server.submit(workload=workload, resource_config={"gpu_count": 0})
    assert server.until(job_id)["status"] == "COMPLETED"
    assert server.lines(job_id) == ["hello from the image"]


@pytest.mark.long  # test_container_images.py has more of them
def test_an_image_that_cannot_be_had_is_named_in_the_failure(container_server: ContainerServer) -> None:
    server = container_server
    never = server.until(server.run("true", workload={"image": "localhost/there-is-none:1"}))
    assert never["error"]["error_type"] == "LAUNCH_REFUSED"
    assert "pull policy is Never" in never["error"]["error_message"]
    wish = {"image": "localhost/there-is-none:1", "container": {"pull_policy": "IfNotPresent"}}
    tried = server.until(server.run("true", workload=wish))
    assert tried["status"] == "FAILED"
    assert "localhost/there-is-none:1" in tried["error"]["error_message"]
    other = server.until(server.run("true", workload={"container": {"runtime": "docker"}}))
    assert "this server's engine is podman" in other["error"]["error_message"]


def test_an_image_without_python_runs_commands_and_no_python_of_ours(container_server: ContainerServer) -> None:
    server = container_server
    plain = plain_image(server.engine)
    own = server.submit(workload={"kind": "container", "image": plain}, resource_config={"gpu_count": 0})
    script = 'echo "$TOKEN $RANK $FROM_IMAGE"; echo wrong >&2; echo made > "$TRAINMASTER_OUTPUT_DIR/made"; exit 9'
    failing = server.run("sh", "-c", script, workload={"image": plain, "environment": {"TOKEN": "word"}})
    absent = server.run("no-such-program", workload={"image": plain})
    workload = {"kind": "function", "image": plain, "source": "def train(): pass", "name": "train"}
    refused = server.submit(workload=workload, resource_config={"gpu_count": 0})
    assert server.until(own)["status"] == "COMPLETED"
    assert server.lines(own) == ["hello from the image"]
    job = server.until(failing)
    assert (job["error"]["error_type"], job["error"]["exit_code"]) == ("EXITED_NONZERO", 9)
    assert sorted(server.lines(failing)) == ["word 0 yes", "wrong"]
    assert (server.directory / "artifacts" / failing / "output" / "made").read_text() == "made\n"
    assert server.until(absent)["error"]["exit_code"] == 127
    assert "it has no python3" in server.until(refused)["error"]["error_message"]


def test_a_stop_reaches_a_container_without_python(container_server: ContainerServer) -> None:
    server = container_server
    script = "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    workload = {"image": plain_image(server.engine)}
    polite, deaf, plain = (
        server.run("sh", "-c", text, workload={**workload, "grace_period_s": grace_s})
        for text, grace_s in (
            (script, 1),
            ("trap '' TERM; echo up; while :; do sleep 1; done", 1),
            # As any other process it dies of the signal, though it is the first of its container.
            ("echo up; while :; do sleep 1; done", 3600),
        )
    )
    for job_id in (polite, deaf, plain):
        server.wait_for_line(job_id, "up")
        server.data("POST", f"/v1/jobs/{job_id}/cancel")
    for job_id in (polite, deaf, plain):
        assert server.until(job_id)["status"] == "CANCELLED"
        # What was booked for it is free now, and so it is gone.
        assert server.containers(job_id) == []
    assert server.lines(polite) == ["up", "saved"]


def test_containers_and_local_jobs_share_one_machine(container_server: ContainerServer) -> None:
    server = container_server
    (node,) = server.data("GET", "/v1/nodes")["nodes"]
    cores = node["cpu"]["total"] if "cpu" in node else node["cpu_cores"]["total"]
    job_id = server.run(*SLEEP, resources={"cpu_cores": cores})
    server.wait_for_line(job_id, "up")
    waits = server.run("true", resources={"cpu_cores": 1}, backend="local")
    wait_for(lambda: "core" in (server.job(waits)["pending_reason"] or ""), "the reason why it waits")
    server.data("POST", f"/v1/jobs/{job_id}/cancel")
    assert server.until(waits)["status"] == "COMPLETED"


def test_a_container_is_kept_for_whoever_wants_to_look_into_it(container_server: ContainerServer) -> None:
    server = container_server
    job_id = server.run("true", workload={"container": {"auto_remove": False}})
    assert server.until(job_id)["status"] == "COMPLETED"
    done = server.run("true")
    server.until(done)
    server.wait_until_cleared(done)  # so the other one could have been removed too
    (name,) = server.containers(job_id)
    server.engine.podman("rm", name)


@pytest.mark.long
def test_labels_of_an_image_are_not_taken_for_ours(container_server: ContainerServer) -> None:
    server = container_server
    recipe = server.home / "labelled"
    recipe.mkdir()
    labels = "LABEL trainmaster.probed-at=x trainmaster.keep=yes trainmaster.node=9"
    (recipe / "Dockerfile").write_text(f"FROM {server.image}\n{labels}\n")
    server.engine.podman("build", "--quiet", "--tag", "localhost/labelled:1", str(recipe))
    job_id = server.run("true", workload={"image": "localhost/labelled:1"})
    assert server.until(job_id)["status"] == "COMPLETED"
    server.wait_until_cleared(job_id)
    server.engine.podman("rmi", "localhost/labelled:1")
