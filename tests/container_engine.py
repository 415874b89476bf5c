"""A real container engine for tests: podman behind a socket of its own, and an image made from this machine's Python.

No registry is asked. The image holds the interpreter that runs the tests at its own place, so that an environment of
this machine which is mounted at its own path works inside, a shell and a few commands.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from patience import PATIENCE_S

PREFIX = Path(sys.base_prefix)
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
IS_OF_THE_SYSTEM = str(PREFIX) == "/usr"
"""Whether Python shares its place with all that is installed, as Debian's does."""
HOME = Path(os.__file__).parent if IS_OF_THE_SYSTEM else PREFIX
"""Where there is nothing but Python."""
SITE = (
    f"/usr/local/lib/python{VERSION}/dist-packages"
    if IS_OF_THE_SYSTEM
    else f"{PREFIX}/lib/python{VERSION}/site-packages"
)
"""Where the Python of the image looks for packages."""
COMMANDS = ("dash", "bash", "echo", "true", "env", "cat", "sleep", "ls", "id", "kill", "mkdir")
LIBRARIES = (
    *("libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1"),
    *("libpthread.so.0", "librt.so.1", "libdl.so.2", "libutil.so.1"),
)
"""What is opened by name at run time, so that nobody links it."""

_API = "http://podman/v4.0.0/libpod"


@dataclass(slots=True, kw_only=True)
class Engine:
    """An engine that answers, unless it was stopped."""

    directory: Path
    """Where it runs: its monitors leave a file there when a container was out of memory."""
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def host(self) -> str:
        """Where it answers: the URL of its socket."""
        return f"unix://{self.directory}/podman.sock"

    def start(self) -> None:
        """Have it answer. Containers need it neither to run nor to end."""
        socket = self.directory / "podman.sock"
        socket.unlink(missing_ok=True)
        command = ["podman", "system", "service", "--time=0", self.host]
        with open(self.directory / "log", "a") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=self.directory)
        deadline = time.monotonic() + PATIENCE_S
        while not socket.exists():
            assert self.process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < deadline, "podman does not answer"
            time.sleep(0.05)

    def stop(self) -> None:
        """Have it answer no longer."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def remove_stale_rules(self) -> None:
        """Remove port forwardings to containers that are gone.

        Podman sometimes leaves one behind when a container is removed while its end is handled. Whoever binds such a
        port of this machine next is unreachable: "No route to host".
        """
        kept = self.podman("ps", "--all", "--quiet", "--no-trunc").split()
        listed = subprocess.run(["iptables", "--table=nat", "-S", _FORWARDINGS], capture_output=True, text=True)
        for line in listed.stdout.splitlines():
            rule = shlex.split(line)
            containers = re.findall(r"name: tm-\S+ id: (\w+)", line)
            if rule[:2] == ["-A", _FORWARDINGS] and containers and containers[0] not in kept:
                subprocess.run(["iptables", "--table=nat", "-D", *rule[1:]], check=True)

    def podman(self, *arguments: str) -> str:
        """What a command of its own says."""
        command = ["podman", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def labelled(self, label: str) -> list[str]:
        """The names of all containers and networks with a label."""
        filters = {"filters": json.dumps({"label": [label]})}
        # By its API: a command of its own would be started anew each time that somebody looks.
        transport = httpx.HTTPTransport(uds=f"{self.directory}/podman.sock", verify=False)
        with httpx.Client(transport=transport, base_url=_API, timeout=PATIENCE_S, trust_env=False) as client:
            containers = client.get("/containers/json", params={"all": "true", **filters}).raise_for_status().json()
            networks = client.get("/networks/json", params=filters).raise_for_status().json()
        return [*(container["Names"][0] for container in containers), *(network["name"] for network in networks)]


_FORWARDINGS = "NETAVARK-HOSTPORT-DNAT"
"""The chain of iptables with the forwarded ports of all containers."""
REQUIRED = "REQUIRE_CONTAINERS"
"""The variable with which CI says that nothing may be skipped for want of an engine."""


def missing() -> str | None:
    """Why there are no containers here; None where there are.

    Raises:
        AssertionError: there are none where they are required.
    """
    absent = [name for name in ("podman", "runc") if shutil.which(name) is None]
    reason = f"{', '.join(absent)} is not installed; scripts/containers.sh does that" if absent else None
    if os.geteuid() != 0:
        reason = "containers are tested as root"
    assert reason is None or not os.environ.get(REQUIRED), reason
    return reason


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """The engine, for the length of a block."""
    # Short, because a socket's path must be.
    with tempfile.TemporaryDirectory(prefix="tm-engine-", dir="/tmp") as place:
        directory = Path(place)
        (directory / "containers.conf").write_text(_configuration())
        # Registries of this machine, on whatever port, have no certificates.
        (directory / "registries.conf").write_text('[[registry]]\nlocation = "127.0.0.1"\ninsecure = true\n')
        settings = {
            "CONTAINERS_CONF": f"{place}/containers.conf",
            "CONTAINERS_REGISTRIES_CONF": f"{place}/registries.conf",
        }
        engine = Engine(directory=directory, environment={**os.environ, **settings})
        engine.remove_stale_rules()
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()
            engine.remove_stale_rules()


def _configuration() -> str:
    """Podman's, for machines that lack what its defaults want: raised limits, systemd, one cgroup hierarchy."""
    files, processes = (
        min(hard, 16384) if (hard := resource.getrlimit(limit)[1]) != resource.RLIM_INFINITY else 16384
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    )
    return f"""
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
runtime = "runc"
events_logger = "file"
cgroup_manager = "cgroupfs"
[network]
network_backend = "netavark"
"""


def python_image(engine: Engine) -> str:
    """The name of an image with this machine's Python; made once for each Python and each version of this recipe."""
    recipe = hashlib.sha256(Path(__file__).read_bytes() + sys.version.encode()).hexdigest()[:12]
    return _made(engine, f"localhost/trainmaster-test-python:{recipe}", with_python=True)


def plain_image(engine: Engine) -> str:
    """The name of an image with a shell and without Python, which greets when it is not told what to do."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    return _made(engine, f"localhost/trainmaster-test-plain:{recipe}", with_python=False)


def _made(engine: Engine, name: str, *, with_python: bool) -> str:
    found = subprocess.run(["podman", "image", "exists", name], env=engine.environment, check=False).returncode == 0
    if not found:
        changes = [f"ENV PATH={PREFIX}/bin:/usr/bin", "ENV FROM_IMAGE=yes", 'CMD ["echo", "hello from the image"]']
        with tempfile.TemporaryDirectory() as directory:
            archive = Path(directory) / "root.tar"
            _archive(archive, with_python=with_python)
            options = [option for change in changes for option in ("--change", change)]
            engine.podman("import", *options, str(archive), name)
    return name


def _archive(archive: Path, *, with_python: bool) -> None:
    programs = [Path(found) for name in COMMANDS if (found := shutil.which(name))]
    linked = [Path(os.path.realpath(program)) for program in programs]
    with tarfile.open(archive, "w") as tar:
        for name in ("tmp", "proc", "sys", "dev", "run", "root", "etc", "usr/bin", "usr/lib", "usr/lib64"):
            directory = tarfile.TarInfo(name)
            directory.type, directory.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            tar.addfile(directory)
        for name in ("bin", "lib", "lib64"):
            _link(tar, name, f"usr/{name}")
        for program in programs:
            tar.add(os.path.realpath(program), f"usr/bin/{program.name}")
        _link(tar, "usr/bin/sh", "dash")
        if with_python:
            for name in ("python3", "python"):
                _link(tar, f"usr/bin/{name}", f"{PREFIX}/bin/python{VERSION}")
            tar.add(HOME, str(HOME).lstrip("/"), filter=_needed)
            interpreter = Path(os.path.realpath(sys.executable))
            if IS_OF_THE_SYSTEM:
                import pip

                tar.add(interpreter, str(interpreter).lstrip("/"))
                for each in Path(pip.__file__).parents[1].glob("pip*"):  # with its metadata
                    tar.add(each, f"{SITE}/{each.name}".lstrip("/"))
            linked += [path for path in HOME.rglob("*.so*") if path.is_file() and "site-packages" not in path.parts]
            linked.append(interpreter)
        for library in sorted(_libraries(linked)):
            tar.add(os.path.realpath(library), f"usr{library}" if library.startswith("/lib") else library.lstrip("/"))


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    link = tarfile.TarInfo(name)
    link.type, link.linkname = tarfile.SYMTYPE, target
    tar.addfile(link)


def _needed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Neither tests, nor what was installed into the interpreter but pip, nor what it is built from."""
    parts = Path(member.name).parts
    if {"test", "idlelib", "tkinter", "include", "share"} & set(parts) or member.name.endswith(".a"):
        return None
    below = parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else ()
    return member if not below or below[0].startswith("pip") else None


def _libraries(programs: list[Path]) -> set[str]:
    """Every library that these are linked with, and those that are opened by name."""
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False).stdout
    found = {word for line in said.splitlines() for word in line.split() if word.startswith("/") and ".so" in word}
    found = {path.rstrip(":") for path in found}
    near = {str(Path(path).parent) for path in found if "libc.so" in path}
    found |= {f"{place}/{name}" for place in near for name in LIBRARIES if os.path.exists(f"{place}/{name}")}
    return {path for path in found if not path.startswith(f"{HOME}/")}
