"""What of a server's data directory its clients look at too."""

from __future__ import annotations

KEPT = "kept"
"""Is there when the server was last started by somebody who keeps it running, and not by a command that needed it."""
AT_REST = "at-rest"
"""Is there when the last server stopped with no unfinished job in its own database. Removed at every start."""
