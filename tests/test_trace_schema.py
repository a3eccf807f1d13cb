"""The documentation of the events is made from the classes."""

from __future__ import annotations

import json
import random

import msgspec

from pagedlab.trace.events import KINDS
from pagedlab.trace.file import encode
from pagedlab.trace.schema import event_page, event_table, field_sources, json_schema, own_fields
from test_trace_fold import new_core, random_actions, recording


def test_the_table_has_a_row_per_event_and_the_page_a_line_per_field():
    rows, page = event_table().splitlines(), event_page()
    assert len(rows) == 2 + len(KINDS)
    for kind, cls in KINDS.items():
        (row,) = [r for r in rows if r.startswith(f"| `{kind}` |")]
        assert f"| {cls.level} |" in row and all(f"`{name}`" in row for name in own_fields(cls))
        section = page.split(f"## `{kind}`\n")[1].split("\n## ")[0]
        assert all(f"| `{name}` |" in section for name in own_fields(cls))
        assert set(own_fields(cls)) <= set(field_sources()[cls.__name__])


def test_a_comment_behind_a_field_is_its_description():
    section = event_page().split("## `slots_mapped`\n")[1].split("\n## ")[0]
    assert "| `table_index` | `list[int]` | row · K + logical_block: an index, not a block id; derived |" in section


def test_the_schema_has_every_kind_and_every_record_of_a_run_fits_it():
    schema = json_schema()
    json.dumps(schema)
    by_kind = {d["properties"]["kind"]["enum"][0]: d for d in schema["$defs"].values() if "kind" in d["properties"]}
    assert set(by_kind) == set(KINDS)
    with recording() as events:
        for _ in random_actions(random.Random(1), new_core(9), 20):
            pass
    for event in events:
        record = msgspec.json.decode(encode(event))
        definition = by_kind[record["kind"]]
        assert set(definition["required"]) <= set(record) <= set(definition["properties"])
