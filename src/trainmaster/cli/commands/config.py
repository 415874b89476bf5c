"""`trainmaster config`: every setting of a server, and where it comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli.exits import ExitCode, say
from trainmaster.cli.options import ConfigOption, DataDirOption, JsonOption
from trainmaster.cli.output import draw, print_json, table

if TYPE_CHECKING:
    from trainmaster.server.settings.resolution import Resolved


def run(
    config: ConfigOption = None,
    data_dir: DataDirOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say what is wrong; exits with 1 when something is.")
    ] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a settings file with every default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every setting of a server, and where it comes from. Needs no server."""
    from trainmaster.server.settings import reference
    from trainmaster.server.settings.resolution import resolve
    from trainmaster.server.settings.values import SettingsError

    if example:
        typer.echo(reference.example(), nl=False)
        return
    try:
        resolved = resolve({"data_dir": data_dir}, config=config)
    except SettingsError as error:
        if as_json:
            print_json({"problems": [{"place": each.place, "message": each.message} for each in error.problems]})
        else:
            say("\n".join(f"error: {problem}" for problem in error.problems))
        raise typer.Exit(ExitCode.REFUSED) from None
    if check and (wrong := _problems(resolved)):
        if as_json:
            print_json({"problems": [{"place": "", "message": message} for message in wrong]})
        else:
            say("\n".join(f"error: {message}" for message in wrong))
        raise typer.Exit(ExitCode.REFUSED)
    if as_json:
        print_json(_document(resolved))
    elif check:
        typer.echo(f"The settings are fine ({resolved.file or 'there is no file'}).")
    else:
        _draw(resolved)


def _problems(resolved: Resolved) -> list[str]:
    from trainmaster.server.process import problems

    return problems(resolved.settings, resolved.declared)


def _document(resolved: Resolved) -> dict[str, object]:
    from trainmaster.server.settings import reference

    return {
        "file": str(resolved.file) if resolved.file else None,
        "problems": [],
        "settings": {
            each.name: {"value": _plain(value), "source": origin.source, "place": origin.place, "meaning": each.meaning}
            for each, value, origin in reference.shown(resolved)
        },
        **{
            name: {entry: {key: _plain(value) for key, value in said.items()} for entry, said in entries.items()}
            for name, entries in reference.shown_tables(resolved).items()
        },
    }


def _draw(resolved: Resolved) -> None:
    from rich.text import Text

    from trainmaster.server.settings import reference
    from trainmaster.server.settings.resolution import Source

    typer.echo(f"File: {resolved.file or 'none'}\n")
    rows = [
        (
            Text(each.name),
            Text(_words(value), style="" if origin.source is Source.DEFAULT else "bold"),
            Text(origin.place or origin.source, style="dim"),
            Text(each.meaning, style="dim"),
        )
        for each, value, origin in reference.shown(resolved)
    ]
    draw(table(("SETTING", "VALUE", "FROM", "MEANING"), rows, wrap=("VALUE", "FROM", "MEANING"), spare=("MEANING",)))
    for name, entries in reference.shown_tables(resolved).items():
        for entry, said in entries.items():
            typer.echo(f"\n[{name}.{entry}]")
            for key, value in said.items():
                typer.echo(f"  {key} = {_words(value)}")


def _plain(value: object) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case tuple():
            return [_plain(each) for each in value]
        case frozenset():
            return sorted(str(each) for each in value)
        case _:
            return str(value)


def _words(value: object) -> str:
    plain = _plain(value)
    match plain:
        case None | "" | []:
            return "–"
        case bool():
            return "true" if plain else "false"
        case list():
            return ", ".join(map(str, plain))
        case _:
            return str(plain)
