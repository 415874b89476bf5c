"""The commands, put together."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trainmaster.cli.commands import (
    accounts,
    cancel,
    checkpoints,
    clone,
    compare,
    config,
    data,
    delete,
    diff,
    doctor,
    down,
    download,
    drain,
    edit,
    enable,
    env,
    events,
    gc,
    init,
    keys,
    login,
    logout,
    logs,
    metrics,
    nodes,
    pause,
    ps,
    queues,
    rerun,
    resume,
    retry,
    run,
    runtimes,
    serve,
    show,
    simulate,
    submit,
    up,
    usage,
    webhooks,
    why,
)
from trainmaster.cli.exits import DEBUG_VARIABLE, EPILOG, CommandError, ExitCode, error_document, report, say
from trainmaster.cli.output import print_json
from trainmaster.client.errors import ClientError

GROUPS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "Run": (init, data, submit, run, cancel, pause, resume, retry, rerun, clone, edit, delete),
        "Look": (ps, show, logs, metrics, events, checkpoints, download, why, diff, compare, runtimes),
        "Cluster": (nodes, queues, drain, enable, accounts, keys, usage),
        "Server": (up, down, login, logout, env, serve, config, webhooks, gc, simulate, doctor),
    }
)
"""Each command is a module with a function `run`, or with an `app` of several commands; its name is the module's."""


MEANT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("jobs", "list", "ls"), "ps"),
        **dict.fromkeys(("status", "describe", "get", "info"), "show"),
        **dict.fromkeys(("train", "start", "create"), "submit"),
        **dict.fromkeys(("stop", "kill"), "cancel"),
        **dict.fromkeys(("rm", "remove"), "delete"),
    }
)
"""What other tools call our commands."""

ClickException: Any = typer.BadParameter.__mro__[2]
"""Wrong usage, as the parser raises it. Which package this class lives in depends on typer's version."""


class Commands(TyperGroup):
    """The commands in groups, with errors told in a line instead of a traceback."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - as the base has it
        """Write the commands under the titles of their groups."""
        width = max(map(len, self.commands))
        for title, modules in GROUPS.items():
            named = {name: self.commands[name] for name in map(name_of, modules)}
            with formatter.section(title):
                formatter.write_dl([(f"{name:{width}}", each.get_short_help_str(100)) for name, each in named.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; of one that other tools have, say what it is called here."""
        if args[0] in MEANT:
            ctx.fail(f"No such command '{args[0]}'. Did you mean '{MEANT[args[0]]}'?")
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Any:
        """Run a command and exit. An error is one line on the standard error and, with --json, a document."""
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


def name_of(module: Any) -> str:
    """What a command's module is called on the command line."""
    return str(module.__name__).rpartition(".")[2]


app = typer.Typer(
    cls=Commands,
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


for _modules in GROUPS.values():
    for _module in _modules:
        if hasattr(_module, "app"):
            app.add_typer(_module.app, name=name_of(_module))
        else:
            app.command(name_of(_module))(_module.run)
