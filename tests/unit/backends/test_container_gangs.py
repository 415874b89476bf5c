"""The plan of a step that has a gang: which containers there are, and how large each is."""

from __future__ import annotations

import json
from pathlib import Path

from trainmaster.backends.container.initializers import plan_document, planned_names
from trainmaster.backends.container.rendering import ImageFacts, Surroundings
from trainmaster.protocol.launch import Gang, Launch, Size, Step
from trainmaster.protocol.request import AttemptRequest, NodeAssignment

AROUND = Surroundings(
    runs=Path("/srv/runs"),
    run_dir=Path("/srv/runs/job-1/2"),
    worker=Path("/srv/workers/worker.pyz"),
    secrets=Path("/dev/shm/trainmaster-0"),
    user="0:0",
    machine_memory_mb=4096,
    passes_gpus=True,
)
IMAGE = ImageFacts(
    id="sha256:1", environment={}, entrypoint=(), command=(), working_directory=None, python="/usr/bin/python3"
)
GANG = Gang(count=2, argv=("-m", "write"), size=Size(cpu_cores=0.5, memory_bytes=3 << 20), head=Size(cpu_cores=2.0))


def test_gang_is_planned_with_its_sizes() -> None:
    step = Step(name="dataset-initializer", argv=("-m", "lead"), python=True, image="org/cache", gang=GANG)
    asked = AttemptRequest(
        job_id="job-1",
        attempt=2,
        token="",
        rank_token="",
        launch=Launch(kind="command", steps=(step, Step(name="main", argv=("train",)))),
        nodes=(NodeAssignment(node_id="a", cpu_cores=4, memory_mb=512),),
        checkpoint_dir="/srv/artifacts/job-1/checkpoints",
        output_dir="/srv/artifacts/job-1/output",
        owner_file="/srv/runs/job-1/owner.json",
    )
    plan = json.loads(json.dumps(plan_document(asked, 0, IMAGE, {"org/cache": IMAGE}, AROUND, engine="unix:///e")))
    head = "tm-job-1.2-0-dataset-initializer"
    planned = plan["containers"]["dataset-initializer"]
    assert planned["names"] == [head, f"{head}-0", f"{head}-1"]
    assert set(planned["names"]) < set(planned_names(plan))
    documents = {"head": planned["document"], "size": planned["gang"]["document"]}
    sizes = {name: [each["HostConfig"][key] for key in ("NanoCpus", "Memory")] for name, each in documents.items()}
    # What is not said is what the job has booked.
    assert sizes == {"head": [2_000_000_000, 512 << 20], "size": [500_000_000, 3 << 20]}
    assert documents["size"]["HostConfig"]["MemorySwap"] == 3 << 20
    assert documents["head"]["HostConfig"]["Mounts"] == documents["size"]["HostConfig"]["Mounts"]
    assert planned["gang"]["argv"] == ["-m", "write"]
