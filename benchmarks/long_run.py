"""A long run of random engines, every step checked from three sides (tests/invariants.py).

    python benchmarks/long_run.py --steps 1000000 --seed 1

Seeded: the same seed gives the same engines and the same requests. Stops at the first broken
invariant and says how to reach it again: ``--seed`` of the engine at fault, ``--engines 1``.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from engines import act_at_random, random_shape
from invariants import Broken, Watched

STEPS_PER_ENGINE = 250
REPORT_EVERY = 60.0  # seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first engine; the next ones count up")
    parser.add_argument("--engines", type=int, default=sys.maxsize, help="stop after so many engines")
    arguments = parser.parse_args()
    started = reported = time.monotonic()
    num_steps = num_engines = 0
    kinds: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    shapes: Counter[str] = Counter()
    while num_steps < arguments.steps and num_engines < arguments.engines:
        seed = arguments.seed + num_engines
        try:
            num_steps += run_engine(seed, kinds, reasons, shapes)
        except (Broken, AssertionError, LookupError, ValueError, TypeError) as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return 1
        num_engines += 1
        if time.monotonic() - reported > REPORT_EVERY:
            reported = time.monotonic()
            print(f"{num_steps:,} steps of {num_engines:,} engines, "
                  f"{num_steps / (reported - started):,.0f} steps/s", flush=True)
    seconds = time.monotonic() - started
    print(f"{num_steps:,} steps of {num_engines:,} engines in {seconds:,.0f} s ({num_steps / seconds:,.0f} steps/s): "
          "no invariant was broken")
    print(f"seeds {arguments.seed} to {arguments.seed + num_engines - 1}")
    for title, counted in (("engines", shapes), ("events", kinds), ("reasons", reasons)):
        print(f"{title}: " + ", ".join(f"{name} {count:,}" for name, count in counted.most_common()))
    return 0


def run_engine(seed: int, kinds: Counter[str], reasons: Counter[str], shapes: Counter[str]) -> int:
    rng = random.Random(seed)
    shape = random_shape(rng)
    shapes.update((shape.policy, "caching on" if shape.enable_prefix_caching else "caching off",
                   f"{len(shape.groups)} groups"))
    watched, num_added = Watched(shape.engine_core()), 0
    with watched.recording(snapshot_every=100):
        for _ in range(STEPS_PER_ENGINE):
            num_added = act_at_random(rng, watched, shape, num_added)
            watched.step()
            kinds.update(event.kind for event in watched.step_events)
            reasons.update(event.reason for event in watched.step_events if hasattr(event, "reason"))
    return STEPS_PER_ENGINE


if __name__ == "__main__":
    raise SystemExit(main())
