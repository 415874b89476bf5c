"""What the jobs of the cases run. Each function travels as its own source alone, and imports what it needs itself."""

# No annotations: their names would have to travel too.


def tell(parameters=None, **named):
    """Say how it was called and what surrounds it, and wait for somebody to open the gate."""
    import os
    import time
    from importlib.util import find_spec
    from pathlib import Path

    gate = Path((parameters or named)["gate"])
    print("arguments:", "one dict" if parameters else "keywords")
    print("package:", "installed" if find_spec("greeting") else "absent")
    print("given:", os.environ.get("BLACKBOX_GIVEN"))
    print("home:", "HOME" in os.environ)
    print("begun", flush=True)
    (gate / "begun").touch()
    for _ in range(1200):
        if (gate / "open").exists():
            break
        time.sleep(0.1)
    print("done", flush=True)


def fail(parameters):
    """End with a code of its own, once every node has said something."""
    import os
    import time
    from pathlib import Path

    gate = Path(parameters["gate"])
    print("number:", parameters["number"])
    print("rank:", os.environ.get("RANK", "0"), flush=True)
    (gate / os.environ.get("RANK", "0")).touch()
    for _ in range(300):
        if len(list(gate.iterdir())) >= int(os.environ.get("WORLD_SIZE", "1")):
            break
        time.sleep(0.1)
    raise SystemExit(3)


def hide(parameters=None, **named):
    """Start a process beside itself, and say nothing for long."""
    import subprocess
    import time
    from pathlib import Path

    subprocess.Popen(["sleep", "300"])
    (Path((parameters or named)["gate"]) / "begun").touch()
    time.sleep(300)


def nothing():
    """Need nothing, do nothing."""
