"""Every notebook runs from top to bottom; what it shows equals the recordings, and needs no kernel afterwards."""

import ast
import gzip
import html
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WIDGET = "application/vnd.jupyter.widget-view+json"
WORKED_EXAMPLES = ROOT / "tests/data/conformance/worker/worked_examples"
STEMS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.py"))


def recorded(name):
    document = json.loads(gzip.decompress((WORKED_EXAMPLES / f"{name}.json.gz").read_bytes()))
    return {case["name"]: case for case in document["cases"]}


def outputs_of(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(notebook):
    return "".join(output.text for output in outputs_of(notebook) if output.output_type == "stream")


def shown_as(notebook, mime):
    return ["".join(o.data[mime]) for o in outputs_of(notebook) if "data" in o and mime in o.data]


def tables_in(notebook):
    """Each table shown, as {name of the list: values as text}."""
    found = []
    for text in shown_as(notebook, "text/html"):
        if "pagedlab-index" in text:
            rows = re.findall(r"<tr[^>]*>(.*?)</tr>", text)
            found.append({
                html.unescape(re.search(r"<th[^>]*>(.*?)</th>", row)[1]): [
                    html.unescape(cell) for cell in re.findall(r"<td[^>]*border:1px[^>]*>(.*?)</td>", row)
                ]
                for row in rows
            })  # fmt: skip
    return found


def test_there_are_eight_notebooks(notebook_nodes):
    assert list(notebook_nodes) == STEMS and len(STEMS) == 8


@pytest.mark.parametrize("stem", STEMS)
def test_a_notebook_runs_quietly_and_every_output_shows_without_a_kernel(notebook_nodes, stem):
    outputs = outputs_of(notebook_nodes[stem])
    assert outputs, "nothing was shown"
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        data = output.get("data", {})
        if WIDGET in data:
            assert "<iframe sandbox=" in "".join(data["text/html"]), "a widget without a page to fall back to"
    assert "widgets" not in notebook_nodes[stem].metadata


@pytest.mark.parametrize("stem", STEMS)
def test_the_reader_predicts_before_seeing(notebook_nodes, stem):
    cells = notebook_nodes[stem].cells
    answers = [i for i, cell in enumerate(cells) if "answer" in cell.metadata.get("tags", ())]
    assert len(answers) >= 3
    for i in answers:
        question = next(cell.source for cell in reversed(cells[:i]) if cell.cell_type == "markdown")
        assert "**Predict.**" in question
        assert "assert" in cells[i].source, "an answer that is not checked"


@pytest.mark.parametrize("stem", STEMS)
def test_a_notebook_is_short_enough_to_read(notebook_nodes, stem):
    words = sum(len(cell.source.split()) for cell in notebook_nodes[stem].cells if cell.cell_type == "markdown")
    code = sum(len(cell.source.splitlines()) for cell in notebook_nodes[stem].cells if cell.cell_type == "code")
    assert words / 200 + code / 40 < 10, "minutes, at 200 words and 40 lines of code a minute"


def test_links_between_notebooks_lead_somewhere(notebook_nodes):
    for notebook in notebook_nodes.values():
        for target in re.findall(r"\]\((\d\d_\w+)\.md\)", "".join(cell.source for cell in notebook.cells)):
            assert target in STEMS


# ---------------------------------------------------------------- against the recordings


def test_the_data_beside_the_notebooks_are_the_recordings():
    for name in ("flat_indices", "state_rows"):
        beside = json.loads((ROOT / "notebooks" / "data" / f"{name}.json").read_text())
        assert {case["name"]: case for case in beside["cases"]} == recorded(name)


def test_the_two_five_three_example_shows_what_vllm_recorded(notebook_nodes):
    notebook, cases = notebook_nodes["03_two_five_three"], recorded("flat_indices")
    slots = dict(re.findall(r"^(\S+)\s+12 lists equal to vLLM's, slots (\[.*\])$", printed(notebook), re.MULTILINE))
    assert {name: ast.literal_eval(values) for name, values in slots.items()} == {
        name: case["slot_mapping"] for name, case in cases.items()
    }
    case, seen = cases["fresh-M7-K4"], set()
    for table in tables_in(notebook):
        for name in table:
            if f"{name} (vLLM)" in table:
                assert table[name] == table[f"{name} (vLLM)"] == list(map(str, case[name]))
                seen.add(name)
    assert seen == {"req_indices", "arange", "positions", "block_table_indices", "block_numbers", "block_offsets",
                    "slot_mapping"}  # fmt: skip
    started = next(table for table in tables_in(notebook) if table.get("positions", [""])[0] == "3")
    assert all(values == list(map(str, cases["started-M9-K5"][name])) for name, values in started.items())


def test_the_controls_of_the_example_hold_a_table_for_every_choice(notebook_nodes):
    page = next(t for t in shown_as(notebook_nodes["03_two_five_three"], "text/html") if "a table with controls" in t)
    document = html.unescape(re.search(r'srcdoc="([^"]*)"', page)[1])
    data = json.loads(re.search(r'id="data">(.*?)</script>', document)[1])
    assert set(data["tables"]) == {f"{m},{b}" for m in range(5, 25) for b in (1, 2, 3, 4)}
    case = recorded("flat_indices")["fresh-M6-K3"]
    rows = {row["name"]: row["values"] for row in data["tables"]["6,2"]["rows"]}
    for name in ("req_indices", "positions", "token_indices", "block_table_indices", "block_numbers", "slot_mapping"):
        assert rows[name] == list(map(str, case[name])), name
    for choice, table in data["tables"].items():
        m, b = map(int, choice.split(","))
        marks = next(row["marks"] for row in table["rows"] if row["name"] == "shortcut")
        assert bool(marks) == (m % b != 0)


def test_slot_207_shows_what_vllm_recorded(notebook_nodes):
    notebook, case = notebook_nodes["04_state_rows"], recorded("state_rows")["two-requests"]
    text = printed(notebook)
    assert "idx_mapping     [7, 6]   recorded [7, 6]" in text
    assert "query_start_loc [0, 1, 9] recorded [0, 1, 9]" in text
    assert "slot 12 · 16 + 15 = 207" in text
    table = next(table for table in tables_in(notebook) if "slot_mapping (vLLM)" in table)
    for name in ("batch_row_of_token", "positions", "slot_mapping"):
        assert table[name] == table[f"{name} (vLLM)"] == list(map(str, case[name]))
    for name, each in recorded("state_rows").items():
        order = " ".join(each["batch_order"])
        assert re.search(rf"^{name}\s+{order}\s+slots {re.escape(str(each['slot_mapping']))}$", text, re.MULTILINE)


# ---------------------------------------------------------------- what is made from them


def test_the_markdown_of_a_notebook_holds_its_outputs_in_one_piece(executed_notebooks):
    text = (executed_notebooks / "06_preemption.md").read_text()
    assert text.startswith("# 6 · Running out of blocks")
    pieces = re.findall(r'^<div class="notebook-output">.*</div>$', text, re.MULTILINE)
    assert len(pieces) >= 10 and all("\n\n" not in piece for piece in pieces)
    assert '<details class="answer" markdown="1">' in text and "r1 is preempted for r0" in text
    assert 'src="data:image/svg+xml;base64,' in text and "<iframe sandbox=" in text


def test_a_failing_cell_is_an_error(notebook_builder, tmp_path):
    source = tmp_path / "09_wrong.py"
    source.write_text("# %%\nassert 1 == 2\n")
    with pytest.raises(Exception, match="assert 1 == 2"):
        notebook_builder.execute(source)


def test_an_unknown_notebook_is_a_sentence(notebook_builder, capsys):
    assert notebook_builder.main(["--only", "99_nothing"]) == 2
    assert capsys.readouterr().err.startswith("pagedlab: there is no notebook '99_nothing' in ")


def test_the_exported_page_shows_the_viewer_and_its_controls_work(browser, notebook_builder, notebook_nodes, tmp_path):
    paths = notebook_builder.write(
        {stem: notebook_nodes[stem] for stem in ("01_first_trace", "03_two_five_three")}, tmp_path, "html"
    )
    errors = []
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(paths[0].as_uri(), wait_until="domcontentloaded")
    frame = page.frame_locator("iframe[title='pagedlab viewer']")
    frame.get_by_text("Token lens: from token to slot").wait_for(timeout=20_000)
    frame.get_by_label("last step (end)").click()
    frame.get_by_text(re.compile("step 5 · event")).wait_for()

    page.goto(paths[1].as_uri(), wait_until="domcontentloaded")
    frame = page.frame_locator("iframe[title='a table with controls']")
    frame.get_by_role("heading", name="K = 4, block tables").wait_for(timeout=20_000)
    frame.get_by_label("max_model_len").press("ArrowRight")
    frame.get_by_role("heading", name="K = 4, block tables [[7], [3, 9, 1], [4, 2]]").wait_for()
    assert frame.locator("td.mark").count() == 0, "8 is a multiple of 2"
    frame.get_by_label("block_size").press("ArrowRight")
    frame.get_by_role("heading", name="K = 3, block tables [[7], [3, 9], [1]]").wait_for()
    assert frame.locator("td.mark").count() > 0, "8 is no multiple of 3"
    page.close()
    assert not errors
