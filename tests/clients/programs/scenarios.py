"""Runs the scenarios of a program one after the other and prints what each has to say, as JSON lines.

Needs nothing but the standard library: it runs in environments that know nothing of Trainmaster.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Scenario = Callable[[], Any]


def main(*scenarios: Scenario) -> None:
    """Run those that the command line names, or all."""
    known = {scenario.__name__: scenario for scenario in scenarios}
    for name in sys.argv[1:] or known:
        try:
            _say(scenario=name, facts=known[name]())
        except Exception:
            _say(scenario=name, error=traceback.format_exc()[-6000:])
    # Clients leave threads behind, which may abort an interpreter that ends under them.
    os._exit(0)


def ask(what: str, **fields: Any) -> Any:
    """Have the test do something, and wait until it has."""
    _say(ask=what, **fields)
    return json.loads(sys.stdin.readline())


def raised(call: Callable[[], Any]) -> dict[str, Any]:
    """The error of a call that must fail."""
    try:
        result = call()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "category": str(getattr(error, "category", "")),
            "status": getattr(error, "status_code", None),
        }
    raise AssertionError(f"it should have failed, and returned {result!r}")


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)
