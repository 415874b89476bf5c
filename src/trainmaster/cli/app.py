"""The command line: its commands in groups, and how it reports errors."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainmaster.cli.commands import (
    accounts,
    backends,
    cluster,
    data,
    doctor,
    history,
    init,
    job_control,
    metrics,
    ps,
    queues,
    results,
    server,
    show,
    simulate,
    submit,
)
from trainmaster.cli.exits import DEBUG_VARIABLE, EPILOG, CommandError, ExitCode, error_document, report, say
from trainmaster.cli.output import print_json
from trainmaster.client.errors import ClientError

GROUPS: Mapping[str, Mapping[str, Any]] = {
    "Run": {
        "init": init.init,
        "data": data.app,
        "submit": submit.submit,
        "run": submit.run,
        "cancel": job_control.cancel,
        "pause": job_control.pause,
        "resume": job_control.resume,
        "retry": job_control.retry,
        "rerun": job_control.rerun,
        "clone": submit.clone,
        "edit": job_control.edit,
        "delete": job_control.delete,
    },
    "Look": {
        "ps": ps.ps,
        "show": show.show,
        "logs": history.logs,
        "metrics": metrics.metrics,
        "events": history.events,
        "checkpoints": results.app,
        "download": results.download,
        "why": history.why,
        "diff": show.diff,
        "compare": show.compare,
        "runtimes": cluster.runtimes,
    },
    "Cluster": {
        "nodes": cluster.nodes,
        "backends": backends.app,
        "queues": queues.app,
        "drain": cluster.drain,
        "enable": cluster.enable,
        "accounts": accounts.accounts_app,
        "keys": accounts.keys_app,
        "usage": queues.usage,
    },
    "Server": {
        "up": server.up,
        "down": server.down,
        "login": server.login,
        "logout": server.logout,
        "env": server.env,
        "serve": server.serve,
        "config": server.config,
        "webhooks": accounts.webhooks_app,
        "gc": results.gc,
        "simulate": simulate.simulate,
        "doctor": doctor.doctor,
    },
}
"""Title of a group -> name of a command -> its function, or the `Typer` of its subcommands."""


MEANT: Mapping[str, str] = {
    **dict.fromkeys(("jobs", "list", "ls"), "ps"),
    **dict.fromkeys(("status", "describe", "get", "info"), "show"),
    **dict.fromkeys(("train", "start", "create"), "submit"),
    **dict.fromkeys(("stop", "kill"), "cancel"),
    **dict.fromkeys(("rm", "remove"), "delete"),
}
"""Name of a command in other tools -> its name here."""

ClickException: Any = typer.BadParameter.__mro__[2]
"""The parser's error for wrong usage. Its package depends on the version of typer."""


class CommandGroups(TyperGroup):
    """The commands in groups; an error is one line instead of a traceback."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as the base has it
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", self.commands[name].get_short_help_str(100)) for name in names])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in MEANT:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{MEANT[args[0]]}'?")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            code = super().main(words, *others, **{**options, "standalone_mode": False})
        except ClickException as error:
            error.show()
            self._print_json(words, {"error": {"code": "USAGE", "message": error.format_message()}, "exit_code": 2})
            code = error.exit_code
        except typer.Abort:
            say("Aborted!")
            code = ExitCode.REFUSED
        except (ClientError, CommandError) as error:
            if os.environ.get(DEBUG_VARIABLE):
                raise
            code = report(error)
            self._print_json(words, error_document(error))
        sys.exit(code or 0)

    def _print_json(self, words: Sequence[str], document: object) -> None:
        if "--json" in itertools.takewhile(lambda word: word != "--", words):
            print_json(document)


app = typer.Typer(
    cls=CommandGroups,
    help="Run model training on machines that you own.",
    epilog=EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from trainmaster import __version__

        typer.echo(f"trainmaster {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None: ...


for _commands in GROUPS.values():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name)
        else:
            app.command(_name)(_command)
