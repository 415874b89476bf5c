"""Checks that the source of a function is Python, and defines the name that will be called. Parsing can take seconds
and holds the interpreter meanwhile, so the server runs this file as a program with limits: standard library only,
`{"source": ..., "name": ...}` on standard input, the problem as JSON on standard output."""

from __future__ import annotations

import ast
import json
import resource
import sys

CPU_S = 2
MEMORY_BYTES = 1 << 30
"""Limits of the process. A source of the largest size that people write takes a tenth of either."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    asked = json.load(sys.stdin)
    json.dump(problem_of(asked["source"], asked["name"], newer_python=asked["newer_python"]), sys.stdout)


def problem_of(source: str, name: str, *, newer_python: bool) -> str | None:
    """What is wrong with a source, which `newer_python` may be able to parse; None when nothing is."""
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        return None if newer_python else f"is no Python: {where}{error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:
        return f"cannot be parsed: {str(error) or type(error).__name__}"
    return None if _binds(module, name) else f"does not define {name!r}"


def _binds(module: ast.Module, name: str) -> bool:
    """Whether a module gives a name a value, one way or another, when it is imported."""
    left: list[ast.AST] = [*module.body]
    while left:
        match node := left.pop():
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) | ast.ClassDef(name=found):
                bound = found == name
            case ast.alias(name=found, asname=called):
                bound = found == "*" or (called or found) == name
            case ast.Name(id=found, ctx=ast.Store()):
                bound = found == name
            case _:
                bound = False
                left.extend(ast.iter_child_nodes(node))
        if bound:
            return True
    return False


if __name__ == "__main__":
    main()
