"""The site is built offline and in strict mode, and its pages work from a folder and from a server."""

import ast
import functools
import gzip
import html
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from dataclasses import fields
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from pagedlab.cli import app
from pagedlab.config import EngineConfig
from pagedlab.figures.draw import FIGURES
from pagedlab.figures.record import RECORDED, stored
from pagedlab.scenarios.library import builtin_names
from pagedlab.trace.events import KINDS, RequestAdded
from pagedlab.viewer.widget import viewer

ROOT = Path(__file__).parent.parent
PAGES = ("index", "figures", "misconceptions", "errata", "known-faults", "reading", "your-own")


@functools.cache
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "walkthrough" / "site_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy_of_the_sources(folder):
    """A clone's files that the site is made from, without anything generated."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    made = shutil.ignore_patterns("generated", "embedded_model", "_built", "__pycache__", "kernel-ipc*")
    for name in ("walkthrough", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=made)
    return folder


def put_notebooks(folder, pages):
    """Pages of notebooks, as if they had just been executed: {stem: text}."""
    target = folder / "walkthrough" / "generated" / "notebooks"
    target.mkdir(parents=True)
    for stem, text in pages.items():
        (target / f"{stem}.md").write_text(text)
    (target / "made-from.txt").write_text(hooks().notebooks_key())


def mkdocs(folder):
    """``mkdocs build --strict``, where every attempt to open a connection fails."""
    program = (
        "import socket, sys\n"
        "def refuse(*a, **k): raise OSError('the build asked for the network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from mkdocs.__main__ import cli\n"
        "cli(['build', '--strict', '--quiet'])\n"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site; notebooks are stand-ins, they are executed in a test of their own."""
    folder = copy_of_the_sources(tmp_path_factory.mktemp("site"))
    frame = viewer(stored("preemption"))._repr_mimebundle_()[0]["text/html"]
    pages = {path.stem: f"# {title}\n" for path, title in hooks().notebooks()}
    pages["01_first_trace"] += f'\n<div class="notebook-output"><div>{frame}</div></div>\n'
    put_notebooks(folder, pages)
    done = mkdocs(folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.found.append((tag, value))


def text_of(site, page):
    return (site / f"{page}.html").read_text()


def test_every_page_of_the_navigation_is_built(site):
    for page in PAGES:
        assert (site / f"{page}.html").is_file()
    for path, _ in hooks().notebooks():
        assert "<h1 id=" in text_of(site, f"generated/notebooks/{path.stem}")
        assert f"generated/notebooks/{path.stem}.html" in text_of(site, "index"), "not in the navigation"
        assert path.stem in text_of(site, "generated/notebooks/index")
    assert len(hooks().notebooks()) == 8


def test_links_inside_the_site_lead_somewhere(site):
    missing = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        links = _Links()
        links.feed(page.read_text())
        for _, link in links.found:
            target = re.split(r"[?#]", link)[0]
            if target and not re.match(r"[a-z]+:|//", target) and not (page.parent / target).exists():
                missing.append((page.name, link))
    assert missing == []


def test_nothing_is_loaded_from_elsewhere(site):
    loading = ("script", "link", "img", "iframe")
    for page in site.rglob("*.html"):
        links = _Links()
        links.feed(page.read_text())
        assert [x for x in links.found if x[0] in loading and re.match(r"(https?:)?//", x[1])] == [], page.name


def test_a_page_that_quotes_a_vanished_symbol_fails_the_build(tmp_path):
    folder = copy_of_the_sources(tmp_path)
    put_notebooks(folder, {path.stem: f"# {title}\n" for path, title in hooks().notebooks()})
    page = folder / "walkthrough" / "reading.md"
    page.write_text(page.read_text().replace("Scheduler.schedule }}", "Scheduler.scheduled_once }}"))
    done = mkdocs(folder)
    assert done.returncode != 0
    assert "sched.scheduler:Scheduler.scheduled_once, which is gone" in done.stderr


def test_a_page_that_names_code_that_is_gone_is_refused():
    assert hooks().on_page_markdown("{{ code kv.group:KVCacheGroup.allocate }}", None, None, None) == (
        "`KVCacheGroup.allocate` in `kv/group.py`"
    )
    with pytest.raises(ValueError, match=r"names pagedlab\.kv\.group:KVCacheGroup\.seize, which is gone"):
        hooks().on_page_markdown("{{ code kv.group:KVCacheGroup.seize }}", None, None, None)


def test_a_link_to_a_notebook_that_is_gone_is_refused():
    with pytest.raises(ValueError, match="links to notebook 99, which does not exist"):
        hooks().on_page_markdown("[x]({{ notebook 99 }})", None, None, None)


def test_code_is_quoted_as_it_stands(site):
    lines = (ROOT / "src" / "pagedlab" / "engine" / "core.py").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "def step(self)" in line)
    last = next(i for i in range(first + 1, len(lines)) if lines[i].strip() and not lines[i].startswith("        "))
    page = text_of(site, "reading")
    assert f"src/pagedlab/engine/core.py, line {first + 1}" in page
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert textwrap.dedent("\n".join(lines[first:last])).strip() in shown


def test_every_fault_on_its_page_is_marked_in_the_code_it_names():
    text = (ROOT / "walkthrough" / "known-faults.md").read_text()
    named = set(re.findall(r"\{\{ code ([\w.]+):([\w.]+) \}\}", text))
    assert len(named) >= 6
    for module, symbol in named:
        path = ROOT / "src" / "pagedlab" / f"{module.replace('.', '/')}.py"
        node = hooks().find(module, symbol)
        source = "\n".join(path.read_text().splitlines()[node.lineno - 1 : node.end_lineno])
        assert "0.14.1" in source or module == "engine.guards", symbol


def test_every_place_marked_as_a_fault_has_its_row():
    text = (ROOT / "walkthrough" / "known-faults.md").read_text()
    rows = Counter(re.findall(r"\{\{ code ([\w.]+:[\w.]+) \}\}", text))
    marked = Counter()
    for path in (ROOT / "src" / "pagedlab").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "src" / "pagedlab").with_suffix("").parts)
        lines = [n for n, line in enumerate(path.read_text().splitlines(), start=1) if "0.14.1 fault:" in line]
        for owner in ast.parse(path.read_text()).body if lines else ():
            for node in [owner, *getattr(owner, "body", ())]:
                if isinstance(node, ast.FunctionDef):
                    symbol = f"{module}:{node.name}" if node is owner else f"{module}:{owner.name}.{node.name}"
                    marked[symbol] += sum(node.lineno <= n <= node.end_lineno for n in lines)
                    lines = [n for n in lines if not node.lineno <= n <= node.end_lineno]
        assert lines == [], f"{path}: a fault outside a function"
    assert marked.total() >= 7 and marked["sched.scheduler:Scheduler._preempt"] == 1
    assert marked - rows == Counter()


def test_the_event_table_lists_every_event_class(site):
    page = text_of(site, "generated/events")
    assert [kind for kind in KINDS if f"<code>{kind}</code>" not in page] == []


def test_no_reference_shows_a_backslash_that_only_guards_a_table(site):
    for page in ("events", "config", "cli"):
        assert r"\|" not in text_of(site, f"generated/{page}"), page
    assert "<code>str | None</code>" in text_of(site, "generated/events")


@pytest.mark.parametrize("page", ["errata", "known-faults", "generated/events", "generated/config", "generated/cli"])
def test_on_a_phone_the_cells_of_a_table_stand_below_each_other(browser, served, page):
    tab = Tab(browser, f"{served}/{page}.html", served, viewport={"width": 390, "height": 800})
    row = tab.tab.locator(".stacked tbody tr").first
    places = [cell.bounding_box() for cell in row.locator("td:not(:empty)").all()]
    assert len(places) >= 2
    assert all(a["y"] + a["height"] <= b["y"] and a["x"] == b["x"] for a, b in pairwise(places))
    tab.close()


def test_the_numbers_of_quoted_lines_stand_beside_their_lines(browser, served):
    tab = Tab(browser, f"{served}/reading.html", served)
    for table in tab.tab.locator(".highlighttable").all():
        numbers, code = (table.locator(part).bounding_box() for part in (".linenodiv pre", ".code pre code"))
        assert abs(numbers["y"] + numbers["height"] - code["y"] - code["height"]) < 14, "less than a line apart"
    tab.close()


def test_on_a_phone_a_figure_is_wide_enough_to_be_read(browser, served):
    tab = Tab(browser, f"{served}/figures.html", served, viewport={"width": 390, "height": 800})
    for figure in tab.tab.locator(".figure.only-light img").all():
        assert figure.bounding_box()["width"] >= 640
    tab.close()


def test_the_configuration_page_lists_every_field_with_vllms_name(site):
    page = text_of(site, "generated/config")
    for field in fields(EngineConfig):
        row = re.search(rf"<td><code>{field.name}</code></td>.*?</tr>", page, re.DOTALL)
        assert row, field.name
        cells = re.findall(r"<td>(.*?)</td>", row[0], re.DOTALL)
        assert len(cells[3]) > 2, f"{field.name} has no name in vLLM"


def test_the_configuration_page_names_switches_that_exist(site):
    command = typer.main.get_command(app).commands["generate"]
    switches = {s for p in command.params for s in p.opts}
    second = re.findall(r"<tr>\s*<td><code>(\w+)</code></td>\s*<td>(.*?)</td>", text_of(site, "generated/config"))
    assert len(second) == len(fields(EngineConfig))
    assert {re.sub(r"<[^>]+>", "", s) for _, s in second} - {"–"} <= switches
    assert [name for name, switch in second if switch == "–"] == ["enforce_eager"]


def test_the_command_page_lists_every_command_and_option(site):
    page = text_of(site, "generated/cli")
    for name, command in typer.main.get_command(app).commands.items():
        assert f"pagedlab {name}" in page
        for parameter in command.params:
            for switch in parameter.opts:
                assert not switch.startswith("-") or switch in page, f"{name} {switch}"


def test_the_command_page_says_what_vllm_calls_a_switch(site):
    page = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text_of(site, "generated/cli")))
    generate = page[page.index("pagedlab generate") :]
    names = {"--num-blocks": "--num-gpu-blocks-override", "--no-prefix-caching": "--enable-prefix-caching"}
    for switch, name in names.items():
        assert generate.index(switch) < generate.index(name) < generate.index(switch) + 200


def test_the_numbers_of_recordings_on_the_landing_page_are_those_in_the_tests():
    data = ROOT / "tests" / "data" / "conformance"

    def lines(name):
        with gzip.open(data / name, "rt") as file:
            return sum(1 for _ in file)

    with gzip.open(data / "kv_init.json.gz", "rt") as file:
        num_initializations = len(json.load(file)["cases"])
    num_runs = sum(lines(file) for file in (data / "scheduler").glob("*.jsonl.gz"))
    text = (ROOT / "walkthrough" / "index.md").read_text()
    assert f"{num_runs} scheduler runs, {lines('worker/index_maps.jsonl.gz')} whole runs" in text
    assert f"{num_initializations} cache initializations" in text


def test_the_figures_are_on_their_page_light_and_dark(site):
    page = text_of(site, "figures")
    for name in FIGURES:
        for theme in ("light", "dark"):
            assert f"{name}.{theme}.svg" in page
            assert (site / "generated" / "figures" / f"{name}.{theme}.svg").is_file()


def recorded_names():
    """Names of all recordings of the real engine that come with the tests."""
    data = ROOT / "tests" / "data" / "conformance"
    names = set()
    for path in [*data.rglob("*.jsonl.gz")]:
        with gzip.open(path, "rt") as file:
            names |= {json.loads(line)["name"] for line in file}
    with gzip.open(data / "kv_init.json.gz", "rt") as file:
        names |= {case["name"] for case in json.load(file)["cases"]}
    for path in (data / "worker" / "worked_examples").iterdir():
        with gzip.open(path, "rt") as file:
            names |= {case["name"] for case in json.load(file)["cases"]}
    return names


def named_in(text):
    """(recordings, scenarios) that a page points to."""
    recordings = set()
    for sentence in re.findall(r"[Rr]ecord(?:ings?|ed (?:table|example)s?)\b((?:[ :,and]*`[\w-]+`)+)", text):
        recordings |= set(re.findall(r"`([\w-]+)`", sentence))
    return recordings, set(re.findall(r"--scenario ([\w-]+)(?![\w.-])", text))


def test_the_evidence_that_pages_point_to_exists():
    known, scenarios = recorded_names(), set(builtin_names())
    seen = 0
    for page in PAGES:
        recordings, shown = named_in((ROOT / "walkthrough" / f"{page}.md").read_text())
        assert recordings - known == set(), page
        assert shown - scenarios == set(), page
        seen += len(recordings) + len(shown)
    assert seen > 30


def test_evidence_that_does_not_exist_is_noticed():
    recordings, scenarios = named_in("recordings `preempt_newest`, `made_up`; `pagedlab trace --scenario no-such`")
    assert recordings - recorded_names() == {"made_up"}
    assert scenarios - set(builtin_names()) == {"no-such"}


def test_the_example_of_the_first_misconception_is_in_the_scenario_it_names():
    """mixed-batch, step 2: r1 knows 5 tokens, 4 are computed, and the fifth needs a second block."""
    trace = stored("mixed-batch")
    before = trace.at(step=2, after="step_started").requests["r1"]
    assert (len(before.token_ids), before.num_computed_tokens, len(before.block_ids[0])) == (5, 4, 1)
    assert len(trace.at(step=2, after="step_scheduled").requests["r1"].block_ids[0]) == 2


def test_every_misconception_links_to_a_notebook_or_a_scenario():
    text = (ROOT / "walkthrough" / "misconceptions.md").read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == 10
    for section in sections:
        assert "{{ notebook " in section or "pagedlab " in section or "--scenario " in section, section[:60]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture
def served(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


class Tab:
    """A page of the site, and everything that went wrong on it."""

    def __init__(self, browser, address, allowed, **context):
        self.errors, self.outside = [], []
        self.tab = browser.new_page(**{"viewport": {"width": 1400, "height": 900}, **context})
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        own = (allowed, "data:", "blob:")
        self.tab.on("request", lambda r: None if r.url.startswith(own) else self.outside.append(r.url))
        self.tab.goto(address)

    def close(self):
        self.tab.close()
        assert self.errors == []
        assert self.outside == []


def assert_landing_page_shows_the_trace(tab):
    place = "document.querySelector('[data-pagedlab-view]')"
    tab.wait_for_function(f"{place}.viewer")
    tab.evaluate(f"{place}.viewer.settled")
    trace = stored("mixed-batch")
    last = max(e.seq for e in trace if e.step == 2)
    state = trace.at(seq=last)
    tab.evaluate(f"async () => {{ const v = {place}.viewer; await v.goto(v.lastEventOf(3)); }}")
    shown = tab.evaluate(f"{place}.viewer.snapshot()")
    assert tab.evaluate(f"{place}.viewer.meta.columns.step[3]") == 2
    assert shown["running"] == state.running
    assert shown["waiting"] == state.waiting
    assert {k: r["tables"] for k, r in shown["requests"].items()} == {k: r.block_ids for k, r in state.requests.items()}
    chips = [c.get_attribute("data-request") for c in tab.locator(".queues .chip").all()]
    assert chips == [*state.waiting, *state.running]


def test_the_landing_pages_viewer_works_from_a_folder(browser, site):
    tab = Tab(browser, (site / "index.html").as_uri(), "file:")
    assert_landing_page_shows_the_trace(tab.tab)
    tab.close()


def test_the_landing_pages_viewer_works_from_a_server(browser, served):
    tab = Tab(browser, f"{served}/index.html", served)
    assert_landing_page_shows_the_trace(tab.tab)
    tab.close()


def test_every_recorded_run_can_be_chosen_on_the_landing_page_and_linked_to(browser, served):
    tab = Tab(browser, f"{served}/index.html#preemption", served)
    place = "document.querySelector('[data-pagedlab-view]')"
    tab.tab.wait_for_function(f"{place}.viewer?.meta.header.config.num_blocks === 5")
    buttons = tab.tab.locator(".runs button")
    assert {b.get_attribute("id") for b in buttons.all()} == set(RECORDED)
    for name in RECORDED:
        tab.tab.locator(f"#{name}").click()
        wanted = max(e.step for e in stored(name))
        tab.tab.wait_for_function(f"{place}.viewer.meta.columns.step.at(-1) === {wanted}")
        tab.tab.evaluate(f"{place}.viewer.settled")
        ids = tab.tab.evaluate(f"{place}.viewer.meta.requests.map((r) => r.id)")
        assert ids == [e.request_id for e in stored(name) if isinstance(e, RequestAdded)], name
        pressed = tab.tab.locator(".runs [aria-pressed=true]")
        assert [b.get_attribute("id") for b in pressed.all()] == [name]
    tab.close()


def test_the_viewer_follows_the_sites_dark_switch(browser, served):
    tab = Tab(browser, f"{served}/index.html", served, color_scheme="light")
    place = "document.querySelector('[data-pagedlab-view]')"
    tab.tab.wait_for_function(f"{place}.viewer")
    assert tab.tab.evaluate(f"{place}.viewer.theme.name") == "light"
    tab.tab.locator("label[for=__palette_1]").click()
    tab.tab.wait_for_function(f"{place}.viewer.theme.name === 'dark'")
    tab.close()


@pytest.mark.parametrize("system", ["light", "dark"])
def test_a_notebooks_viewer_follows_the_sites_dark_switch(browser, served, system):
    """It stands in a frame that cannot see the page around it, and the system may say something else."""
    address = f"{served}/generated/notebooks/01_first_trace.html"
    tab = Tab(browser, address, served, color_scheme=system, bypass_csp=True)
    frame = next(f for f in tab.tab.frames if f.parent_frame)
    other = {"light": "dark", "dark": "light"}
    for theme in (system, other[system], system):
        frame.wait_for_function(f"window.viewer?.theme.name === '{theme}'")
        background = frame.evaluate("getComputedStyle(viewer.main).backgroundColor")
        assert (background == "rgb(255, 255, 255)") == (theme == "light")
        tab.tab.locator("label[for^=__palette_]:visible").click()
    tab.tab.emulate_media(color_scheme=other[system])  # what the reader chose stands
    tab.tab.reload()
    frame = next(f for f in tab.tab.frames if f.parent_frame)
    frame.wait_for_function(f"window.viewer?.theme.name === '{other[system]}'")
    tab.tab.locator("label[for^=__palette_]:visible").click()
    frame.wait_for_function(f"window.viewer?.theme.name === '{system}'")
    tab.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_its_window(browser, served, site, width):
    pages = [f"{page}.html" for page in PAGES] + [f"generated/{page}.html" for page in ("cli", "config", "events")]
    for page in pages:
        tab = Tab(browser, f"{served}/{page}", served, viewport={"width": width, "height": 800})
        assert tab.tab.evaluate("document.documentElement.scrollWidth") <= width, page
        tab.close()


def test_the_executed_notebooks_are_pages_that_open_without_an_error(browser, executed_notebooks, tmp_path):
    folder = copy_of_the_sources(tmp_path)
    pages = {path.stem: path.read_text() for path in executed_notebooks.glob("*.md")}
    put_notebooks(folder, pages)
    done = mkdocs(folder)
    assert done.returncode == 0, done.stderr
    for stem in pages:
        tab = Tab(browser, (folder / "site" / "generated" / "notebooks" / f"{stem}.html").as_uri(), "file:")
        assert tab.tab.locator(".notebook-output").count() > 3, stem
        tab.close()
