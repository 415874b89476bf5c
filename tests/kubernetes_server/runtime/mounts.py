"""The file system of a container: this machine's, with volumes mounted over it in a mount namespace of its own."""

from __future__ import annotations

import ctypes
import os
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_AT_FDCWD, _AT_RECURSIVE, _CLONE_TREE, _EMPTY_PATH = -100, 0x8000, 1, 4
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    if _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} at {target}: {os.strerror(number)}")


def check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter(mounts: list[dict[str, Any]], hidden: list[str], folders: list[str], scratch: str) -> None:
    """Give this process, which is alone in its mount namespace, the file system of a container."""
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    # Copies of the sources that nothing refers to yet: their places may soon be hidden.
    sources = [(_detached(each["source"]), os.path.isdir(each["source"])) for each in mounts]
    root = _Root(scratch)
    for folder in hidden:
        if os.path.isdir(folder):
            mount("tmpfs", folder, "tmpfs", 0, "mode=755")
    for each, (source, is_folder) in zip(mounts, sources, strict=True):
        target = root.make(each["target"], is_folder=is_folder)
        moved = _libc.syscall(_MOVE_MOUNT, source, b"", _AT_FDCWD, target.encode(), _EMPTY_PATH)
        check(moved, f"mount {each['source']} at {target}")
        if each.get("readonly"):
            mount("none", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY)
        os.close(source)
    for folder in folders:
        root.make(folder, is_folder=True)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _detached(path: str) -> int:
    tree = int(_libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), _CLONE_TREE | _AT_RECURSIVE | os.O_CLOEXEC))
    check(tree < 0, f"mount {path}")
    return tree


class _Root:
    """Makes mount points that this machine does not have, without making them on this machine.

    The folder in which one is missing is replaced by an empty one, in which everything that it had is mounted again.
    """

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch
        self._replaced: set[str] = set()
        self._made: set[str] = set()

    def make(self, path: str, *, is_folder: bool) -> str:
        real = os.path.realpath(path)
        if not os.path.exists(real):
            above = os.path.dirname(real)
            while not os.path.isdir(above):
                above = os.path.dirname(above)
            if not self._is_own(above):
                self._replace(above)
            folder = real if is_folder else os.path.dirname(real)
            os.makedirs(folder, exist_ok=True)
            while folder != above:
                self._made.add(folder)
                folder = os.path.dirname(folder)
            if not is_folder:
                os.close(os.open(real, os.O_CREAT | os.O_WRONLY, 0o644))
        return real

    def _is_own(self, folder: str) -> bool:
        """Whether a folder is one that was made here: what was mounted again in a replaced one is not."""
        return folder in self._replaced or folder in self._made

    def _replace(self, folder: str) -> None:
        fresh = os.path.join(self._scratch, f"folder-{len(self._replaced)}")
        os.makedirs(fresh, exist_ok=True)
        mount("tmpfs", fresh, "tmpfs", 0, "mode=755")
        with os.scandir(folder) as entries:
            found = list(entries)
        for entry in found:
            inside = os.path.join(fresh, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), inside)
                continue
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(inside)
            else:
                os.close(os.open(inside, os.O_CREAT | os.O_WRONLY, 0o644))
            mount(entry.path, inside, "", MS_BIND | MS_REC)
        if folder == "/":
            os.chdir(fresh)
            check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
            check(_libc.umount2(b".", MNT_DETACH), "umount")
            os.chdir("/")
        else:
            mount(fresh, folder, "", MS_BIND | MS_REC)
        self._replaced.add(folder)
