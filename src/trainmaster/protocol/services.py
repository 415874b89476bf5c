"""What the server and the services that jobs are agree on."""

from __future__ import annotations

TOKEN_HEADER = "x-trainmaster-token"
"""On every request that the server passes on: what the attempt's ranks hold too (`TRAINMASTER_TOKEN_FILE`). A service
listens where others on its machine can reach it; by this it knows that the server asks, and has seen who does."""
