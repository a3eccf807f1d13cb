"""The event classes as documentation: a JSON Schema of the file, and a table of all events.

Both are made from the classes, their docstrings and the comments behind their fields, so they cannot
say anything else than the code does.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Any, Union

import msgspec

from pagedlab.trace import events
from pagedlab.trace.events import EVENT_TYPES, Event


def json_schema() -> dict[str, Any]:
    """JSON Schema of one record; unknown fields and unknown kinds are allowed by the format."""
    schema: dict[str, Any] = msgspec.json.schema(Union[EVENT_TYPES])  # noqa: UP007
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "pagedlab trace record", **schema}


def event_table() -> str:
    """Markdown: one row per event, in the order in which a token meets them."""
    rows = ["| kind | level | says | fields |", "| --- | --- | --- | --- |"]
    for cls in EVENT_TYPES:
        says = " ".join((cls.__doc__ or "").split())
        fields = ", ".join(f"`{name}`" for name in own_fields(cls))
        rows.append(f"| `{kind_of_class(cls)}` | {cls.level} | {_cell(says)} | {fields} |")
    return "\n".join(rows) + "\n"


def event_page() -> str:
    """Markdown: a section per event, a line per field with its type and its comment."""
    parts = []
    for cls in EVENT_TYPES:
        parts.append(f"## `{kind_of_class(cls)}`\n\nLevel `{cls.level}`. {' '.join((cls.__doc__ or '').split())}\n")
        rows = []
        for name in own_fields(cls):
            annotation, comment = field_sources()[cls.__name__].get(name, ("", ""))
            marks = ["differs from run to run"] * (name in cls.volatile) + ["derived"] * (
                name in getattr(cls, "derived", ())
            )
            rows.append(f"| `{name}` | `{annotation}` | {_cell('; '.join(filter(None, [comment, *marks])))} |")
        if rows:
            parts.append("| field | type | |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def kind_of_class(cls: type[Event]) -> str:
    return str(cls.__struct_config__.tag)


def own_fields(cls: type[Event]) -> tuple[str, ...]:
    """Without the envelope."""
    return tuple(name for name in cls.__struct_fields__ if name not in Event.__struct_fields__)


@cache
def field_sources() -> dict[str, dict[str, tuple[str, str]]]:
    """Class -> field -> (annotation, comment), as they stand in events.py."""
    source = inspect.getsource(events)
    lines = source.splitlines()
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields = found.setdefault(node.name, {})
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    rest = lines[(item.end_lineno or item.lineno) - 1].encode()[item.end_col_offset or 0 :].decode()
                    fields[item.target.id] = (ast.unparse(item.annotation), rest.partition("# ")[2].strip())
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
