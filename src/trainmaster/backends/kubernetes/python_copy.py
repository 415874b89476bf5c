"""Copies the Python that runs it, with its C library and all else that it loads, into a folder from which it runs in a
container of any image.

Run as `python -c SOURCE FOLDER` with this file's text, in an init container whose image has Python.

| in the folder | what it is |
|---|---|
| `ld.so` | the dynamic loader, which starts `bin/python3` with `--library-path` |
| `bin/python3`, `lib/python3.N` | the interpreter and its standard library |
| `lib` | the shared libraries of the interpreter and of its modules |
| `ca.pem` | the certificates that its image trusts, if there are any |
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import ssl
import sys
import sysconfig

LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "tkinter", "config-*")
"""Parts of the standard library that no worker needs: most of its size."""
WITH_MANY_LIBRARIES = ("_tkinter", "_curses", "_dbm", "_gdbm", "readline")
"""Modules that no worker needs, by the beginnings of their names."""


def main(folder: str) -> None:
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    libraries = os.path.join(folder, "lib")
    for name in ("bin", "lib"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    shutil.copy2(interpreter, os.path.join(folder, "bin", "python3"))
    for path in loaded():
        if os.path.basename(path).startswith("ld-"):
            shutil.copy2(path, os.path.join(folder, "ld.so"))
        own = os.path.basename(path)
        shutil.copy2(path, os.path.join(libraries, own))
        for name in names_of(path):
            os.symlink(own, os.path.join(libraries, name))
    stdlib = sysconfig.get_path("stdlib")
    target = os.path.join(libraries, os.path.basename(stdlib))
    shutil.copytree(stdlib, target, ignore=shutil.ignore_patterns(*LEFT_OUT), dirs_exist_ok=True)
    if (trusted := ssl.get_default_verify_paths().cafile) is not None:
        shutil.copy(trusted, os.path.join(folder, "ca.pem"))


def loaded() -> set[str]:
    """The files that this process runs from, once it has loaded every module of the standard library."""
    modules = os.path.join(sysconfig.get_path("stdlib"), "lib-dynload")
    for name in os.listdir(modules):
        if not name.startswith(WITH_MANY_LIBRARIES):
            with contextlib.suppress(OSError):  # an image may lack what a module needs
                ctypes.CDLL(os.path.join(modules, name))
    with contextlib.suppress(OSError):
        socket.getaddrinfo("localhost", None)  # older C libraries load what looks names up
    with open("/proc/self/maps") as file:
        places = [line.split(maxsplit=5)[5:] for line in file]
    paths = {os.path.realpath(place[0].strip()) for place in places if place and place[0].startswith("/")}
    return {path for path in paths if ".so" in os.path.basename(path) and os.path.dirname(path) != modules}


def names_of(library: str) -> list[str]:
    """Further names under which a library may be asked for: those of the links beside it."""
    beside, own = os.path.split(library)
    links = (name for name in os.listdir(beside) if os.path.islink(os.path.join(beside, name)))
    return [name for name in links if name != own and os.path.realpath(os.path.join(beside, name)) == library]


if __name__ == "__main__":
    main(sys.argv[1])
