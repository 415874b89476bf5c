"""`trainmaster doctor`: is everything as it should be?"""

from __future__ import annotations

import dataclasses

import typer

from trainmaster.cli.exits import ExitCode
from trainmaster.cli.options import JsonOption
from trainmaster.cli.output import draw, print_json, table


def doctor(as_json: JsonOption = False) -> None:
    """Check this machine and the server, and say what to do. Exits with 1 when something is broken."""
    from trainmaster.cli.doctor_checks import Verdict, examine

    findings = list(examine())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        from rich.text import Text

        colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
        rows = [
            (
                Text(finding.verdict, style=colours[finding.verdict]),
                Text(finding.check),
                Text(finding.found),
                Text(finding.remedy, style="dim"),
            )
            for finding in findings
        ]
        draw(table(("", "CHECK", "FOUND", "WHAT TO DO"), rows, wrap=("FOUND", "WHAT TO DO")))
    if any(finding.verdict is Verdict.FAIL for finding in findings):
        raise typer.Exit(ExitCode.REFUSED)
