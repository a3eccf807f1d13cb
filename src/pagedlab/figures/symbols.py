"""Names of our code that a figure or a page mentions: resolved, so that they cannot drift."""

from __future__ import annotations

import ast
from functools import cache
from importlib.resources import files
from pathlib import Path

from pagedlab.errors import UserError


def code(symbol: str) -> str:
    """``sched.scheduler:Scheduler.schedule`` -> ``Scheduler.schedule``, if it still exists.

    Raises:
        UserError: there is no such module, class or function any more.
    """
    module, _, name = symbol.partition(":")
    if find(module, name) is None:
        raise UserError(f"pagedlab.{module} has no {name}: a figure or page that names it must be changed.")
    return name


def find(module: str, name: str) -> ast.AST | None:
    """The definition of ``Class.method`` or ``function`` in ``pagedlab.module``."""
    body: list[ast.stmt] = _tree(module).body
    found: ast.AST | None = None
    for part in name.split("."):
        found = next(
            (
                node for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
            ),
            None,
        )  # fmt: skip
        if found is None:
            return None
        body = getattr(found, "body", [])
    return found


@cache
def _tree(module: str) -> ast.Module:
    source = Path(str(files("pagedlab"))).joinpath(*module.split(".")).with_suffix(".py")
    if not source.is_file():
        raise UserError(f"there is no module pagedlab.{module}: a figure or page that names it must be changed.")
    return ast.parse(source.read_text(encoding="utf-8"))
