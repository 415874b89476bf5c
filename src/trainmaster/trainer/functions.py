"""The user's code that is uploaded with a job: a function, or the files of a script's directory.

A function travels as the text of a module that defines it, with arguments that JSON can hold. Only its own source goes
along, so a name from its surroundings is refused before anything is sent: it would be a NameError minutes later.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import inspect
import math
import symtable
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainmaster.client.directories import kept_files
from trainmaster.client.file_upload import MAX_FILES

_FUTURE_ANNOTATIONS = "from __future__ import annotations\n\n"
_INDENTED = "if True:\n"
"""In front of a function that was defined inside of something: a dedent would change its multi-line texts."""


def source_of(function: object) -> str:
    """The text of a module that defines a function. Raises ValueError, with what to do, if it cannot be sent."""
    if not inspect.isfunction(function):
        raise ValueError(f"{_kind(function)} cannot be sent as a trainer's func; pass a function (`def`)")
    name = function.__name__
    if name == "<lambda>":
        raise ValueError("a lambda cannot be sent as a trainer's func; write it as a function (`def`)")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ValueError(f"{name} is a generator, and would not run when it is called; make it a plain function")
    if hasattr(function, "__wrapped__"):
        raise ValueError(f"{name} is decorated, and only its own source is sent; pass the bare function")
    if function.__closure__:
        inner = ", ".join(function.__code__.co_freevars)
        raise ValueError(f"{name} uses {inner} of the function around it; pass that through func_args")
    text = _text(function)
    _check(function, text)
    return text


def check_arguments(function: Callable[..., Any], arguments: object) -> dict[str, Any]:
    """The arguments as a JSON object with which the function can be called; raises ValueError if they are not."""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"func_args must be a dict of the function's arguments, not {_kind(arguments)}")
    if (problem := next(_not_json(arguments, "func_args"), None)) is not None:
        raise ValueError(problem)
    plain: dict[str, Any] = dict(arguments)
    signature = inspect.signature(function)
    try:
        signature.bind(**plain)
    except TypeError as error:
        try:
            # With all of them as one dict, where there are any: so the job calls it too.
            signature.bind(*([plain] if plain else []))
        except TypeError:
            raise ValueError(f"{function.__name__}{signature} cannot be called with func_args: {error}") from None
    return plain


def tuple_paths(value: object, path: tuple[str | int, ...] = ()) -> Iterator[list[str | int]]:
    """The ways to the tuples in a value, which JSON has as lists; the inner ones first.

    >>> list(tuple_paths({"shape": (1, (2, 3)), "rows": [(4, 5)]}))
    [['shape', 1], ['shape'], ['rows', 0]]
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tuple_paths(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from tuple_paths(inner, (*path, index))
        if isinstance(value, tuple):
            yield list(path)


def _text(function: Callable[..., Any]) -> str:
    name = function.__name__
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        raise ValueError(
            f"the source of {name} is not to be found; define it in a file or in a notebook's cell, not at a prompt"
        ) from None
    if source[:1].isspace():
        source = _INDENTED + source
    if function.__code__.co_flags & __future__.annotations.compiler_flag:
        source = _FUTURE_ANNOTATIONS + source
    return source


def _check(function: Callable[..., Any], text: str) -> None:
    name = function.__name__
    try:
        tree = ast.parse(text)
    except SyntaxError:
        raise ValueError(f"the source of {name} cannot be read; define it as a `def` of its own") from None
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    found = next((node for node in functions if node.name == name), None)
    if found is None:
        raise ValueError(f"the source of {name} does not define it; was its file changed after its import?")
    if found.decorator_list:
        raise ValueError(f"{name} is decorated, and only its own source is sent; pass the bare function")
    outside = sorted(_outside(text) - {name})
    if outside:
        raise ValueError(
            f"{name} uses {', '.join(outside)}, which it does not define: only the function's own source is sent; "
            "import or define them inside of it, or pass values through func_args"
        )


def _outside(text: str) -> set[str]:
    """Names that the text uses and neither defines nor finds among Python's own."""
    used: set[str] = set()
    defined: set[str] = set(dir(builtins))

    def look(table: symtable.SymbolTable, *, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.get_name().startswith("__"):
                continue
            if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace():
                if top or symbol.is_declared_global():
                    defined.add(symbol.get_name())
            elif symbol.is_referenced() and (top or symbol.is_global()):
                used.add(symbol.get_name())
        for child in table.get_children():
            look(child, top=False)

    look(symtable.symtable(text, "function", "exec"), top=True)
    return used - defined


def _not_json(value: object, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _not_json(inner, f"{path}[{key!r}]")
            else:
                yield f"{path} has the key {key!r}; keys of func_args must be text, as it travels as JSON"
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _not_json(inner, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}, which JSON cannot hold"
    elif value is not None and not isinstance(value, str | int | float):
        yield f"{path} is {_kind(value)}; func_args travel as JSON: numbers, text, lists and dicts"


def _kind(value: object) -> str:
    return f"the method {value.__name__}" if inspect.ismethod(value) else f"a {type(value).__name__}"


def files_of(directory: Path) -> list[str]:
    """The files to ship, relative to the directory, sorted: those that git would keep. ValueError: none or too many."""
    if not directory.is_dir():
        raise ValueError(f"there is no directory {directory}")
    found = kept_files(directory)
    if not found:
        raise ValueError(f"there is nothing in {directory} to send along")
    if len(found) > MAX_FILES:
        raise ValueError(f"{directory} has {len(found)} files; at most {MAX_FILES} can be uploaded with a job")
    return found
