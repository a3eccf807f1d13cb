"""What mkdocs does not do by itself: pages made from code and traces, and code quoted by symbol.

Before the build, ``generated/`` is filled: the viewer and its traces, the figures, the executed
notebooks, and the references of events, commands and configuration. In a page,

    {{ quote kv.manager:KVCacheManager.allocate_slots }}

becomes the source of that symbol, and the build fails if it is gone. ``{{ notebook 04 }}`` becomes
the address of notebook 04's page, and ``{{ code kv.group:KVCacheGroup.allocate }}`` names that symbol,
if it still exists.
"""

from __future__ import annotations

import hashlib
import html
import importlib.util
import inspect
import json
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer

from pagedlab.config import EngineConfig
from pagedlab.figures.files import write_figures
from pagedlab.figures.record import RECORDED, stored
from pagedlab.figures.symbols import find
from pagedlab.trace.schema import event_page, event_table, json_schema
from pagedlab.viewer.pack import pack
from pagedlab.viewer.page import asset, module

HERE = Path(__file__).parent
NOTEBOOKS = HERE.parent / "notebooks"
GENERATED = HERE / "generated"
SOURCE = Path(inspect.getfile(EngineConfig)).parent
VLLM_NAMES = {
    "model": "`--model`",
    "device": "chosen by the installed build",
    "dtype": "`--dtype`",
    "attention_backend": "`--attention-backend`",
    "runner": "`VLLM_USE_V2_MODEL_RUNNER=1` for the newer one",
    "block_size": "`--block-size`",
    "num_blocks": "`--num-gpu-blocks-override`",
    "kv_cache_memory": "`--kv-cache-memory-bytes`",
    "gpu_memory_utilization": "`--gpu-memory-utilization`",
    "max_model_len": "`--max-model-len`",
    "max_num_seqs": "`--max-num-seqs`",
    "max_num_batched_tokens": "`--max-num-batched-tokens`",
    "long_prefill_token_threshold": "`--long-prefill-token-threshold`",
    "policy": "`--scheduling-policy`",
    "enable_prefix_caching": "`--enable-prefix-caching`",
    "enable_chunked_prefill": "`--enable-chunked-prefill`",
    "seed": "`--seed`",
    "enforce_eager": "`--enforce-eager`",
}
QUOTE = re.compile(r"\{\{ quote ([\w.]+):([\w.]+) \}\}")
CODE = re.compile(r"\{\{ code ([\w.]+):([\w.]+) \}\}")
NOTEBOOK = re.compile(r"\{\{ notebook (\d\d) \}\}")


def on_config(config: Any) -> None:
    """Put the notebooks into the navigation, by their own titles."""
    pages = [{title: f"generated/notebooks/{path.stem}.md"} for path, title in notebooks()]
    for i, entry in enumerate(config["nav"]):
        if "Notebooks" in entry:
            config["nav"][i] = {"Notebooks": [{"Overview": entry["Notebooks"]}, *pages]}


def on_pre_build(config: Any) -> None:
    """Fill ``generated/``."""
    (GENERATED / "views").mkdir(parents=True, exist_ok=True)
    _write(GENERATED / "viewer.js", _viewer_script())
    for name in RECORDED:
        packed = pack(stored(name))
        data = json.dumps({"meta": packed.meta, "chunks": packed.chunks})
        _write(GENERATED / "views" / f"{name}.js", f"pagedlabViews[{json.dumps(name)}] = {data};\n")
    write_figures(GENERATED / "figures")
    _write(GENERATED / "events.md", _events_page())
    _write(GENERATED / "trace.schema.json", json.dumps(json_schema(), indent=1))
    _write(GENERATED / "cli.md", _cli_page())
    _write(GENERATED / "config.md", _config_page())
    _build_notebooks(GENERATED / "notebooks")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put quoted source, names of code and addresses of notebooks in."""
    markdown = CODE.sub(lambda match: _code(match[1], match[2]), markdown)
    markdown = NOTEBOOK.sub(lambda match: _notebook(match[1]), markdown)
    return QUOTE.sub(lambda match: _quote(match[1], match[2]), markdown)


def notebooks() -> list[tuple[Path, str]]:
    """The notebooks' sources in reading order, each with its title: the first heading in it."""
    found = []
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py")):
        heading = re.search(r"^# # (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        if heading is None:
            raise ValueError(f"{path.name} has no heading")
        found.append((path, heading[1].replace("\\", "")))
    return found


def _write(path: Path, text: str) -> None:
    """Only what changed, so that ``mkdocs serve`` does not build for ever."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _viewer_script() -> str:
    """The viewer as a classic script, which also works from a folder, and the code that finds its places."""
    body = module().replace("export default {", "const widget = {")
    return f"""(() => {{
{body}
const base = document.currentScript.src;
window.pagedlabViews = window.pagedlabViews ?? {{}};
const css = {json.dumps(asset("viewer.css"))};
function follow() {{ // the site's light or dark switch, in viewers of the page and in those that stand in frames
  const theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  for (const place of document.querySelectorAll("[data-pagedlab-view]")) place.viewer?.setTheme(theme);
  for (const frame of document.querySelectorAll("iframe.pagedlab-viewer"))
    frame.contentWindow.postMessage({{ pagedlabTheme: theme }}, "*");
}}
new MutationObserver(follow).observe(document.body, {{ attributeFilter: ["data-md-color-scheme"] }});
document.addEventListener("load", (event) => {{ if (event.target.matches?.("iframe")) follow(); }}, true);
function start() {{
  follow();
  for (const place of document.querySelectorAll("[data-pagedlab-view]")) {{
    if (place.shadowRoot) continue;
    const show = () => {{
      const name = place.dataset.pagedlabView, run = window.pagedlabViews[name];
      if (run) {{
        place.viewer?.destroy();
        place.viewer = mount(place, {{ meta: run.meta, readChunk: (chunk) => run.chunks[chunk], css }});
        follow();
        return;
      }}
      const script = document.createElement("script");
      script.src = new URL(`views/${{name}}.js`, base);
      script.onload = show;
      document.head.append(script);
    }};
    const buttons = [...document.querySelectorAll(".runs button")];
    const choose = (name) => {{
      place.dataset.pagedlabView = name;
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.id === name));
      show();
    }};
    for (const button of buttons) button.onclick = () => choose(button.id);
    const asked = location.hash.slice(1);
    const isKnown = buttons.some((button) => button.id === asked);
    choose(isKnown ? asked : place.dataset.pagedlabView);
  }}
}}
if (window.document$) window.document$.subscribe(start);
else if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
else start();
}})();
"""


def _quote(module_name: str, symbol: str) -> str:
    node = find(module_name, symbol)
    if node is None:
        raise ValueError(f"a page quotes pagedlab.{module_name}:{symbol}, which is gone")
    path = SOURCE.joinpath(*module_name.split(".")).with_suffix(".py")
    lines = path.read_text(encoding="utf-8").splitlines()
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])  # type: ignore[attr-defined]
    code = "\n".join(lines[first - 1 : node.end_lineno])  # type: ignore[attr-defined]
    where = f"src/pagedlab/{path.relative_to(SOURCE)}, line {first}"
    return f'```python title="{where}" linenums="{first}"\n{textwrap.dedent(code)}\n```'


def _code(module_name: str, symbol: str) -> str:
    if find(module_name, symbol) is None:
        raise ValueError(f"a page names pagedlab.{module_name}:{symbol}, which is gone")
    return f"`{symbol}` in `{module_name.replace('.', '/')}.py`"


def _events_page() -> str:
    return (
        "# Events of the trace\n\nMade from the event classes. The envelope of every record: `kind`, `seq`, `engine`, "
        "`step`, `t_ns`, `proc`. A [JSON Schema](trace.schema.json) says the same for machines.\n\n"
        + _stacked("events", event_table() + "\n" + event_page())
    )


def _cli_page() -> str:
    from pagedlab.cli import app

    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line\n\nMade from the commands themselves. Exit status: 0 done, 1 a difference or violation was "
        "found, 2 bad input, 130 after Ctrl-C.\n"
    ]
    for name, command in sorted(group.commands.items()):
        arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
        parts.append(f"## pagedlab {name} {' '.join(arguments)}\n\n{inspect.cleandoc(command.help or '')}\n")
        rows = [
            f"| `{_spelling(p)}` | {_cell(getattr(p, 'help', None) or '')} | {VLLM_NAMES.get(_field(p), '')} |"
            for p in command.params
            if p.name != "help"
        ]
        if rows:
            table = "| argument or option | | in vLLM |\n| --- | --- | --- |\n" + "\n".join(rows)
            parts.append(_stacked("cli", table))
    return "\n".join(parts)


def _field(parameter: Any) -> str:
    """Name of the field that a switch sets: ``no_prefix_caching`` -> ``enable_prefix_caching``."""
    return re.sub(r"^no_", "enable_", parameter.name)


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join((*parameter.opts, *parameter.secondary_opts))


def _config_page() -> str:
    """Fields, switches, defaults and vLLM's own names; every field must have one."""
    comments, switches = _attribute_docs(EngineConfig), _switches()
    rows = [
        f"| `{f.name}` | {switches.get(f.name, ('–', ''))[0]} | `{f.default!r}` | {VLLM_NAMES[f.name]} | "
        f"{_cell(comments.get(f.name) or switches[f.name][1])} |"
        for f in fields(EngineConfig)
    ]
    table = "| field | switch | default | in vLLM | |\n| --- | --- | --- | --- | --- |\n" + "\n".join(rows)
    return (
        "---\nhide: [toc]\n---\n\n# Configuration\n\n"
        "Fields of `EngineConfig`, their switches on the command line, and what vLLM calls them. "
        f"Made from the class and the commands.\n\n{_stacked('config', table)}"
    )


def _switches() -> dict[str, tuple[str, str]]:
    """Field -> (its switch, what the switch says of itself), from ``pagedlab generate``."""
    from pagedlab.cli import app

    group: Any = typer.main.get_command(app)
    found = {}
    for parameter in group.commands["generate"].params:
        found[_field(parameter)] = (f"`{parameter.opts[0]}`", getattr(parameter, "help", None) or "")
    return found


def _attribute_docs(cls: type) -> dict[str, str]:
    """The ``Attributes:`` section of a docstring."""
    lines = inspect.cleandoc(cls.__doc__ or "").splitlines()
    found: dict[str, str] = {}
    name = None
    for line in lines[lines.index("Attributes:") + 1 :] if "Attributes:" in lines else []:
        if match := re.match(r"    (\w+): (.*)", line):
            name = match[1]
            found[name] = match[2]
        elif name and line.startswith("        "):
            found[name] += f" {line.strip()}"
    return found


def _notebook(number: str) -> str:
    name = next((path.stem for path, _ in notebooks() if path.stem.startswith(number)), None)
    if name is None:
        raise ValueError(f"a page links to notebook {number}, which does not exist")
    return f"generated/notebooks/{name}.md"


def _build_notebooks(folder: Path) -> None:
    """Executed notebooks as pages, made by ``notebooks/build.py``; run again only if they or the code changed."""
    folder.mkdir(exist_ok=True)
    seen = dict(re.findall(r"^\| `(\w+)\.py` \| (.+) \|$", (NOTEBOOKS / "README.md").read_text("utf-8"), re.MULTILINE))
    rows = "\n".join(f"| [{title}]({path.stem}.md) | {seen[path.stem]} |" for path, title in notebooks())
    _write(
        folder / "index.md",
        "# Notebooks\n\nEach takes less than ten minutes, runs from top to bottom on a CPU, and asks you to predict "
        "before it shows. What you see here was executed when the site was built; the sources lie in `notebooks/` "
        "and open in Jupyter with jupytext.\n\n| notebook | what you see |\n| --- | --- |\n"
        f"{rows}\n\nIn a hurry? 1, 2 and 3 are the core: steps, blocks, and the way from a token to its slot.\n",
    )
    made_from, key = folder / "made-from.txt", notebooks_key()
    if made_from.is_file() and made_from.read_text(encoding="utf-8") == key:
        return
    spec = importlib.util.spec_from_file_location("build_notebooks", NOTEBOOKS / "build.py")
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    build.build(folder)
    _write(made_from, key)


def notebooks_key() -> str:
    """A hash of what the executed notebooks depend on: their sources and data, and the package."""
    digest = hashlib.sha256()
    data = NOTEBOOKS / "data"
    sources = [*NOTEBOOKS.glob("*.py"), *data.rglob("*.*"), *(p for p in SOURCE.rglob("*.*") if p.suffix != ".pyc")]
    for path in sorted(path for path in sources if path.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _stacked(kind: str, markdown: str) -> str:
    """Tables whose cells stand below each other on a phone; ``site.css`` names them there by their kind."""
    return f'<div class="stacked {kind}" markdown>\n\n{markdown}\n\n</div>\n'


def _cell(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
