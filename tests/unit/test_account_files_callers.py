"""Who touches files on the server: below directories that accounts can write to, `account_files` alone."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

import trainmaster

ROOT = Path(trainmaster.__file__).parent
SERVER = ("backends", "protocol", "server")
MODULE = "protocol/account_files"

CALLERS = {
    "server/http/artifact_files.py",
    "server/coordinator/base_models.py",
    "server/coordinator/data_checks.py",
    "server/coordinator/moving.py",
    "server/coordinator/promotion.py",
    "server/coordinator/restoring.py",
    "server/coordinator/retention.py",
    "server/coordinator/tombstones.py",
    "protocol/documents.py",
    "protocol/run_directory.py",
    "server/storage.py",
    "server/attempt_store/store.py",
    "server/http/attempt_files.py",
    "server/coordinator/upload_collection.py",
}
"""The server's modules that use it. Whoever is new here works on files of accounts: have it reviewed as such."""

_OWN = "a directory of the server's own, which no account can write to"
_OPERATOR = "files of the operator's, whose directories no account can write to"
_JOB = "runs in a job, with the rights of the job"
ALLOWED: Mapping[str, tuple[str, set[str]]] = {
    "server/http/routes/blobs.py": (_OWN, {"open", "os.replace", ".unlink", ".mkdir"}),
    "backends/container/__init__.py": (
        "sources of mounts; the directory above each is the server's own",
        {".mkdir"},
    ),
    "backends/container/container_process.py": (
        "/proc, and the engine's cgroup",
        {".read_bytes", ".read_text", ".write_text"},
    ),
    "backends/container/supervision.py": (
        "its plan is the server's own; streams are made in a directory of the server's own, without following a link",
        {".read_bytes", "os.open"},
    ),
    "backends/container/plans.py": (_OWN, {".mkdir", ".unlink", ".glob"}),
    "backends/container/secret_files.py": (
        "the server's own, and a directory in memory; containers have a part of that mounted, whose file is made anew",
        {".mkdir", ".unlink", "open", "os.open", "shutil.rmtree", ".read_text"},
    ),
    "server/coordinator/assembly.py": ("the operator's certificates", {".read_text"}),
    "backends/ray/keeper.py": ("/proc of a node, where it runs beside the worker", {"open", "os.listdir"}),
    "backends/ray/render.py": ("files of this package", {".read_text"}),
    "backends/ray/driver.py": ("a file of its own on the head node, where it runs", {"open", "os.replace"}),
    "backends/kubernetes/python_copy.py": (
        "a volume of a pod, where it runs",
        {*("open", "os.makedirs", "os.listdir", "os.symlink", "shutil.copy", "shutil.copy2", "shutil.copytree")},
    ),
    "backends/kubernetes/carried_python.py": ("a file of this package", {".read_text"}),
    "backends/kubernetes/connection.py": ("what Kubernetes mounts into the server's own pod", {"open"}),
    "backends/cluster/worker_start.py": ("a file of this package", {".read_text"}),
    "backends/worker_package.py": (
        _OWN,
        {*(".mkdir", ".chmod", "os.replace", ".glob", ".unlink", ".read_bytes", ".write_bytes", ".rglob")},
    ),
    "backends/stand_ins.py": (_OWN, {".unlink"}),
    "backends/local/fork_client.py": (_OWN, {".mkdir", "open", ".read_text"}),
    "backends/local/__init__.py": (
        "the server's data directory and roots, whose entries are the server's own",
        {".iterdir", ".mkdir", ".chmod"},
    ),
    "server/coordinator/base_models.py": ("reads what account_files has opened", {"open"}),
    "server/http/artifact_files.py": ("reads what account_files has opened", {"open"}),
    "server/coordinator/data_checks.py": (
        "beside the check's directory, where only the server can write",
        {"open", "os.open"},
    ),
    "server/coordinator/moving.py": ("the lock, in a directory of the server's own", {"os.open"}),
    "server/coordinator/restoring.py": (
        "uploaded files, in a directory of the server's own, and files that account_files has opened",
        {"open", "os.replace", "os.utime", ".mkdir", ".unlink"},
    ),
    "server/coordinator/operator_files.py": (_OPERATOR, {".iterdir", ".read_text"}),
    "protocol/documents.py": (
        "directories of the server's own, and names in directories that account_files has opened",
        {"open", "os.open", "os.fchown", "os.replace", "os.unlink"},
    ),
    "protocol/function_runner.py": (_JOB, {"open", "os.replace"}),
    "protocol/mpi_nodes.py": (_JOB, {"open"}),
    "protocol/processes.py": ("/proc", {".read_text"}),
    "protocol/run_directory.py": (
        "the run directory itself, above what a job writes; below, names in directories that account_files has opened",
        {
            *(".mkdir", "os.chmod", ".unlink", ".read_bytes", "open", "os.chown"),
            *("os.link", "os.unlink", "os.scandir"),
        },
    ),
    "protocol/sockets.py": (_OWN, {"os.open", ".unlink", ".chmod"}),
    "server/assembly.py": (_OWN, {".glob"}),
    "server/process.py": (_OWN, {".mkdir", ".unlink", "open"}),
    "server/settings/encryption.py": (_OWN, {".mkdir", ".read_text", "open", "os.link", "os.unlink"}),
    "server/settings/listener.py": (_OWN, {".read_text", ".write_text"}),
    "server/settings/resolution.py": (_OPERATOR, {".read_text"}),
    "server/storage.py": (_OWN, {".mkdir"}),
    "server/store/sqlite.py": (_OWN, {".read_text", "os.open"}),
}
"""What other modules of the server do to files, and why that is safe."""

_OS = {
    *("chmod", "chown", "fchown", "fwalk", "lchown", "link", "listdir", "makedirs", "mkdir", "mkfifo"),
    *("mknod", "open", "remove", "removedirs", "rename", "renames", "replace", "rmdir", "scandir", "symlink"),
    *("truncate", "unlink", "utime", "walk"),
}
_SHUTIL = {"chown", "copy", "copy2", "copyfile", "copyfileobj", "copymode", "copystat", "copytree", "move", "rmtree"}
_PATH = {
    *("chmod", "glob", "hardlink_to", "iterdir", "lchmod", "link_to", "mkdir", "read_bytes", "read_text", "rename"),
    *("rglob", "rmdir", "symlink_to", "unlink", "walk", "write_bytes", "write_text"),
}


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = [path for name in SERVER for path in sorted((ROOT / name).rglob("*.py"))]
    return [(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


@functools.cache
def file_operations(tree: ast.Module) -> set[str]:
    """The calls in a module that look for, open or change files by name."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="open")):
                found.add("open")
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in _OS:
                found.add(f"os.{name}")
            case ast.Attribute(value=ast.Name(id="shutil"), attr=name) if name in _SHUTIL:
                found.add(f"shutil.{name}")
            case ast.ImportFrom(module="os" | "shutil", names=names):
                found |= {f"from {node.module}: {name.name}" for name in names if name.name in _OS | _SHUTIL}
            case ast.Attribute(attr=name) if name in _PATH:
                found.add(f".{name}")
            case ast.Call(func=ast.Attribute(attr="replace"), args=[_], keywords=[]):
                found.add(".replace")  # of a path: text is replaced by something
    return found


def test_only_one_module_touches_files_below_directories_that_accounts_can_write_to() -> None:
    wrong = {}
    for name, tree in modules():
        if not name.startswith(MODULE) and (surplus := file_operations(tree) - ALLOWED.get(name, ("", set()))[1]):
            wrong[name] = surplus
    assert wrong == {}, "use trainmaster.protocol.account_files, or say in ALLOWED why no account can write there"


def test_list_of_exceptions_has_no_more_than_there_are() -> None:
    done = {name: file_operations(tree) for name, tree in modules()}
    unused = {name: operations - done.get(name, set()) for name, (_, operations) in ALLOWED.items()}
    assert {name: operations for name, operations in unused.items() if operations} == {}


def test_callers_of_the_module_are_known() -> None:
    callers = set()
    for name, tree in modules():
        text = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        text |= {
            f"{node.module}.{each.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        if any(each.startswith("trainmaster.protocol.account_files") for each in text):
            callers.add(name)
    assert {name for name in callers if not name.startswith(MODULE)} == CALLERS
