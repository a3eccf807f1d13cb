"""How the viewer's page bears a large trace, in a real Chromium.

    python benchmarks/viewer.py [--requests 256] [--blocks 10000] [--steps 2000] [--keep page.html]

Records a run on the stand-in model at level `blocks`, writes the page, opens it and scrubs through
it with the mouse. Aims: at most 25 MiB; interactive in 2 s; 95 % of frames within 50 ms while
scrubbing; no task over 200 ms. Exits 1 if one is missed. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from pagedlab.scenarios.scenario import Scenario, build_engine_core
from pagedlab.trace.trace import Trace
from pagedlab.trace.tracer import tracing
from pagedlab.viewer.page import write_page

AIMS = {"page MiB": 25, "interactive, s": 2, "95 % of frames, ms": 50, "longest task, ms": 200}
WATCH = """
window.tasks = []; window.frames = []; window.readyAt = null;
new PerformanceObserver((list) => { for (const e of list.getEntries()) tasks.push(e.duration); })
  .observe({ type: "longtask", buffered: true });
(function wait() {
  if (window.viewer?.settled) viewer.settled.then(() => requestAnimationFrame(() => { readyAt = performance.now(); }));
  else setTimeout(wait, 5);
})();
"""
FRAMES = """() => { let last = performance.now(); window.frames = []; window.tasks = []; window.measuring = true;
  (function frame() { const now = performance.now(); frames.push(now - last); last = now;
    if (measuring) requestAnimationFrame(frame); })(); }"""


def record(num_requests: int, num_blocks: int, num_steps: int) -> Trace:
    """Requests that come over the first tenth of the run, with a shared beginning for every other one."""
    rng = random.Random(1)
    shared = [rng.randrange(50_000) for _ in range(160)]
    requests, script = {}, {}
    for i in range(num_requests):
        own = [rng.randrange(50_000) for _ in range(rng.randrange(20, 600))]
        length = rng.randrange(200, max(201, num_steps))
        requests[f"r{i}"] = {
            "prompt_token_ids": (shared if i % 2 else []) + own,
            "max_tokens": length,
            "sampled_token_ids": [rng.randrange(50_000) for _ in range(length)],
        }
        script.setdefault(i * num_steps // (10 * num_requests), []).append(f"r{i}")
    config = {
        "block_size": 16, "num_blocks": num_blocks, "max_num_seqs": num_requests, "max_num_batched_tokens": 2048,
        "max_model_len": 4096,
    }  # fmt: skip
    scenario = Scenario.from_document(
        {"format": "pagedlab-scenario/1", "name": "large", "about": "", "config": config, "requests": requests,
         "script": [{"before_step": step, "add": ids} for step, ids in sorted(script.items())]},
        "large",
    )  # fmt: skip
    with tracing("blocks") as trace:
        core = build_engine_core(scenario)
        for step in range(num_steps):
            for _, request_id in scenario.actions_before(step):
                core.add_request(scenario.make_request(request_id))
            core.step()
    return trace


def measure(page_file: Path) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((path for name in names if (path := shutil.which(name))), None)
    if chromium is None:
        raise SystemExit("no Chromium found: install it, for example with apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_page(viewport={"width": 1400, "height": 900}, bypass_csp=True)
        tab.add_init_script(WATCH)
        tab.goto(page_file.as_uri())
        tab.wait_for_function("window.readyAt !== null", timeout=60_000)
        found = {"interactive, s": tab.evaluate("readyAt") / 1000}
        opening = tab.evaluate("Math.max(0, ...tasks)")
        frames, scrubbing = _scrub(tab)
        found["95 % of frames, ms"] = frames[int(len(frames) * 0.95)]
        found["median frame, ms"] = frames[len(frames) // 2]
        found["longest task while opening, ms"] = opening
        found["longest task, ms"] = max(opening, scrubbing)
        found["random jump, ms (median)"], found["random jump, ms (longest)"] = _jump(tab)
        browser.close()
    return found


def _scrub(tab) -> tuple[list[float], float]:
    """Drag along the timeline, there and back, and then event by event; frames and the longest task."""
    box = tab.evaluate("(({x, y, width}) => ({x, y, width}))(viewer.timeline.canvas.getBoundingClientRect())")
    tab.evaluate(FRAMES)
    tab.mouse.move(box["x"] + 5, box["y"] + 20)
    tab.mouse.down()
    for i in [*range(200), *range(200, 0, -1)]:
        tab.mouse.move(box["x"] + 5 + (box["width"] - 10) * i / 200, box["y"] + 20)
        time.sleep(0.008)
    tab.mouse.up()
    tab.evaluate("viewer.settled")
    for _ in range(40):
        tab.keyboard.press("PageDown")
    tab.evaluate("async () => { await viewer.settled; measuring = false; }")
    return sorted(tab.evaluate("frames")), tab.evaluate("Math.max(0, ...tasks)")


def _jump(tab) -> tuple[float, float]:
    """Milliseconds from anywhere to anywhere, all panels drawn."""
    jumps = tab.evaluate("""async () => {
      const times = [];
      let seed = 1;
      for (let i = 0; i < 40; i += 1) {
        seed = (seed * 16807) % 2147483647;
        const start = performance.now();
        await viewer.goto(Math.floor((seed / 2147483647) * viewer.meta.num_events));
        times.push(performance.now() - start);
      }
      return times.sort((a, b) => a - b);
    }""")
    return jumps[len(jumps) // 2], jumps[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="leave the page there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="measure a page written before")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        page = arguments.page or arguments.keep or Path(folder) / "large.html"
        if arguments.page is None:
            start = time.perf_counter()
            trace = record(arguments.requests, arguments.blocks, arguments.steps)
            print(f"recorded {len(trace.events):,} events of {arguments.steps:,} steps "
                  f"in {time.perf_counter() - start:.0f} s")
            start = time.perf_counter()
            write_page(trace, page)
            print(f"packed in {time.perf_counter() - start:.0f} s")
        found["page MiB"] = page.stat().st_size / 2**20
        found |= measure(page.absolute())
    for name, value in found.items():
        aim = AIMS.get(name)
        print(f"{name:32} {value:9.1f}" + (f"   aim {aim}{'' if value <= aim else '   MISSED'}" if aim else ""))
    return int(any(found[name] > aim for name, aim in AIMS.items()))


if __name__ == "__main__":
    sys.exit(main())
