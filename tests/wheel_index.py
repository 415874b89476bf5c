"""A package index of wheels that are made on the spot: as a directory, or served over HTTP."""

from __future__ import annotations

import functools
import http.server
import threading
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from patience import PATIENCE_S


class WheelIndex:
    """A directory in the shape of a package index; its `url` can be given to pip and uv."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.url = directory.as_uri()

    def add(
        self,
        name: str,
        version: str,
        source: str = "",
        requires: Sequence[str] = (),
        scripts: Mapping[str, str] | None = None,
    ) -> Path:
        """Put a distribution with one module of its name into it; `scripts`: command -> `module:function`."""
        place = self.directory / name
        place.mkdir(exist_ok=True)
        wheel = place / f"{name}-{version}-py3-none-any.whl"
        about = f"{name}-{version}.dist-info"
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}.py", source or f"VERSION = {version!r}\n")
            archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
            archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            if scripts:
                commands = "".join(f"{command} = {target}\n" for command, target in scripts.items())
                archive.writestr(f"{about}/entry_points.txt", f"[console_scripts]\n{commands}")
            archive.writestr(f"{about}/RECORD", "")
        links = "".join(f'<a href="{each.name}">{each.name}</a>\n' for each in sorted(place.glob("*.whl")))
        (place / "index.html").write_text(f"<!DOCTYPE html>\n<html><body>\n{links}</body></html>\n")
        return wheel


class ServedIndex(WheelIndex):
    """The same over HTTP, and it can be made to keep whoever wants a wheel waiting."""

    def __init__(self, directory: Path, address: str = "127.0.0.1") -> None:
        super().__init__(directory)
        self.open = threading.Event()
        """Cleared: nobody is sent a wheel until it is set again."""
        self.open.set()
        self.asked = threading.Event()
        """Somebody wanted a wheel."""
        handler = functools.partial(_Handler, index=self, directory=str(directory))
        self._server = http.server.ThreadingHTTPServer((address, 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *arguments: Any, index: ServedIndex, **options: Any) -> None:
        self._index = index
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            self._index.asked.set()
            self._index.open.wait(PATIENCE_S)
        try:
            super().do_GET()
        except ConnectionError:
            self.close_connection = True  # it did not wait to the end

    def log_message(self, *arguments: Any) -> None:
        pass
