"""What backends are called, by servers and clients alike."""

from __future__ import annotations

LOCAL = "local"
"""Its jobs are processes of the server's machine."""
CONTAINER = "container"
"""Its jobs run in containers of that machine."""
