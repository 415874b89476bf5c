"""The command line: `trainmaster`, or `tm` for short. Talks HTTP; only `serve` runs the server itself.

What a command needs is imported when it runs: `trainmaster --help` should feel instant.
"""

from __future__ import annotations


def main() -> None:
    from trainmaster.cli.app import app

    app()
