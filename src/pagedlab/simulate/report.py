"""What a simulation says: numbers for people, and the same for machines."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from pagedlab.simulate.memory import CATEGORIES, MemoryBySteps
from pagedlab.simulate.paged import Simulation
from pagedlab.simulate.workload import mean
from pagedlab.wording import plural, printable

WIDTH = 80
NUM_PHASES = 10  # rows of the table over time

# Percent of KV memory that holds token states: PagedAttention paper (SOSP 2023), Figure 2.
PAPER = {"max": 20.4, "pow2": 26.8, "oracle": 38.2, "paged": 96.3}
LABELS = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "paged (vLLM)"}
COLUMNS = (
    "tokens: hold keys and values; reserved: given to a request that will still use them; internal: given to one that "
    "never will; external: free and enough for the head of the queue, but too scattered (never when paged); free: the "
    "rest"
)
DIFFERS = (
    "Max reserves max_model_len for every request, Pow2 the prompt and the output rounded up to a power of two, Oracle "
    "the prompt and the true output; paged takes blocks as tokens come. What differs from the paper's set-up: its "
    "requests have the lengths of ShareGPT conversations, which are not at hand; the lengths here are as stated above. "
    "Its engines ran OPT models of several sizes on A100s (OPT-13B on one of them: 15.7 thousand slots, its Table 1), "
    "and requests arrived by the clock; here time is counted in steps, of which a step with many requests really takes "
    "longer. Its Figure 2 averages a whole experiment; the rows here average the steps in which requests waited, as "
    "memory that nobody asks for says nothing about an allocator. Its vLLM is the one of 2023; paged here is the "
    "scheduler of 0.14, which keeps free blocks findable. Its 'external fragmentation and others' is external waste "
    "plus free here. The older engines are modelled, in the paper as here: reservations at admission, {fit}, the same "
    "queue, budget and seats, no preemption and no shared prefixes."
)
FIT_WORDS = {
    "buddy": "a buddy allocator (as the paper assumes)",
    "first": "first fit over one range of slots (the paper assumes a buddy allocator)",
    "best": "best fit over one range of slots (the paper assumes a buddy allocator)",
}


def report_text(
    about: str, config: Mapping[str, Any], paged: Simulation, contiguous: Mapping[str, Simulation], fit: str | None
) -> str:
    """The whole report; ``contiguous`` maps a reservation to its run and may be empty."""
    parts = [_setting(about, config, paged.memory), _counts(paged), _memory_over_time(paged.memory)]
    if fit is not None:
        parts.append(_comparison({**contiguous, "paged": paged}))
        parts.append(_wrapped(DIFFERS.format(fit=FIT_WORDS[fit])))
    return "\n\n".join(parts) + "\n"


def _setting(about: str, config: Mapping[str, Any], memory: MemoryBySteps) -> str:
    caching = "on" if config.get("enable_prefix_caching", True) else "off"
    chunked = "on" if config.get("enable_chunked_prefill", True) else "off"
    return "\n".join(
        [
            _wrapped(f"Workload: {printable(' '.join(about.split()), 1000)}."),
            _wrapped(
                f"Pool: {plural(config['num_blocks'] - 1, 'usable block')} of {plural(config['block_size'], 'token')}, "
                f"{plural(memory.num_slots, 'slot')}; policy {config.get('policy', 'fcfs')}, "
                f"{plural(config.get('max_num_seqs', 256), 'seat')}, "
                f"{plural(config.get('max_num_batched_tokens', 2048), 'token')} a step, "
                f"max_model_len {config.get('max_model_len', 2048):,}, prefix caching {caching}, chunked "
                f"prefill {chunked}."
            ),
        ]
    )


def _counts(run: Simulation) -> str:
    reasons = Counter(run.finish_reasons.values())
    ends = [f"{count:,} {reason}" for reason, count in sorted(reasons.items())]
    ends += [f"{len(run.refused):,} refused"] if run.refused else []
    steps, scheduled, hits = run.num_steps, run.num_scheduled_tokens, run.num_cached_tokens
    idle = f" ({plural(run.num_idle_steps, 'idle step')} left out)" if run.num_idle_steps else ""
    rows = {
        "steps": f"{steps:,}{idle}",
        "requests ended": ", ".join(ends),
        "scheduled tokens": f"{scheduled:,}, {scheduled / max(steps, 1):,.1f} a step",
        "preemptions": f"{run.num_preemptions:,}",
        "recomputed tokens": f"{run.num_recomputed_tokens:,}, {_percent(run.num_recomputed_tokens, scheduled)}"
        " of those scheduled",
        "prefix-cache hits": f"{hits:,} of {plural(run.num_prompt_tokens, 'prompt token')}, "
        f"{_percent(hits, run.num_prompt_tokens)}",
        "  in all look-ups": f"{run.lookup_hits:,} of {plural(run.lookup_queries, 'token')}, "
        f"{_percent(run.lookup_hits, run.lookup_queries)}, as vLLM counts them:\n{'':20}again for each refused try and "
        "after each preemption",
        "steps from arrival": "",
        "  until admitted": _spread(run.queue_steps),
        "  to first token": _spread(run.first_token_steps),
        "  to last token": _spread(run.end_steps),
    }
    lines = [f"{name:<20}{value}".rstrip() for name, value in rows.items()]
    for sentence in (*list(run.refused.values())[:1], *list(run.errors.values())[:1]):
        lines.append(_wrapped(f"for example: {printable(sentence)}"))
    return "\n".join(lines)


def _memory_over_time(memory: MemoryBySteps) -> str:
    """Shares by tenths of the run, then averages."""
    lines = [
        "KV memory, percent of the pool; running and waiting are requests",
        f"{'steps':<16}{'running':>9}{'waiting':>9}{'tokens':>9}{'reserved':>10}{'internal':>10}{'external':>10}{'free':>7}",
    ]
    for first, last in _phases(memory.num_steps):
        name = f"{first:,}" if last == first + 1 else f"{first:,}-{last - 1:,}"
        lines.append(_memory_row(memory, name, range(first, last)))
    lines.append(_memory_row(memory, "all", range(memory.num_steps)))
    lines.append(_memory_row(memory, "while any waited", memory.pressed_steps()))
    lines.append(_wrapped(COLUMNS))
    return "\n".join(lines)


def _memory_row(memory: MemoryBySteps, name: str, steps: Sequence[int]) -> str:
    if not steps:
        return f"{name:<16}{'none':>9}"
    shares = memory.shares(steps)
    waiting = mean([memory.num_waiting[step] for step in steps])
    tokens, reserved, internal, external, free = (shares[name] for name in CATEGORIES)
    return (
        f"{name:<16}{memory.mean_running(steps):>9,.1f}{waiting:>9,.1f}{tokens:>9.1f}{reserved:>10.1f}"
        f"{internal:>10.1f}{external:>10.1f}{free:>7.1f}"
    )


def _phases(num_steps: int) -> list[tuple[int, int]]:
    bounds = sorted({num_steps * i // NUM_PHASES for i in range(NUM_PHASES + 1)})
    return list(pairwise(bounds))


def _comparison(runs: Mapping[str, Simulation]) -> str:
    lines = [
        "Percent of KV memory while requests waited (paper: its Figure 2, token states)",
        f"{'':<17}{'tokens':>7}{'paper':>7}{'reserved':>9}{'internal':>9}{'external':>9}{'free':>6}{'running':>8}{'steps':>8}",
    ]
    for name, run in runs.items():
        steps = run.memory.pressed_steps() or range(run.memory.num_steps)
        shares = run.memory.shares(steps)
        tokens, reserved, internal, external, free = (shares[category] for category in CATEGORIES)
        lines.append(
            f"{LABELS[name]:<17}{tokens:>7.1f}{PAPER[name]:>7.1f}{reserved:>9.1f}{internal:>9.1f}{external:>9.1f}"
            f"{free:>6.1f}{run.memory.mean_running(steps):>8.1f}{run.num_steps:>8,}"
        )
    unpressed = [LABELS[name] for name, run in runs.items() if not run.memory.pressed_steps()]
    if unpressed:
        lines.append(f"(nobody ever waited with {', '.join(unpressed)}: these rows average all steps)")
    return "\n".join(lines)


def report_json(
    about: str, config: Mapping[str, Any], paged: Simulation, contiguous: Mapping[str, Simulation], fit: str | None
) -> dict[str, Any]:
    """The same for machines, with every step's memory."""
    return {
        "workload": about,
        "config": dict(config),
        "paged": _numbers(paged),
        "contiguous": {name: _numbers(run) for name, run in contiguous.items()},
        "fit": fit,
        "paper_token_states_percent": PAPER if fit else {},
        "differs": DIFFERS.format(fit=FIT_WORDS[fit]) if fit else None,
        "memory_by_step": {
            name: [round(value, 3) for value in getattr(paged.memory, name)]
            for name in (*CATEGORIES, "num_running", "num_waiting")
        },
    }


def _numbers(run: Simulation) -> dict[str, Any]:
    steps = run.memory.pressed_steps()
    return {
        "num_steps": run.num_steps,
        "num_idle_steps": run.num_idle_steps,
        "finish_reasons": dict(Counter(run.finish_reasons.values())),
        "num_refused": len(run.refused),
        "num_scheduled_tokens": run.num_scheduled_tokens,
        "num_preemptions": run.num_preemptions,
        "num_recomputed_tokens": run.num_recomputed_tokens,
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_cached_tokens": run.num_cached_tokens,
        "lookup_hits": run.lookup_hits,
        "lookup_queries": run.lookup_queries,
        "queue_steps": _times(run.queue_steps),
        "first_token_steps": _times(run.first_token_steps),
        "end_steps": _times(run.end_steps),
        "num_slots": run.memory.num_slots,
        "memory_percent": run.memory.shares(range(run.num_steps)),
        "memory_percent_while_waiting": run.memory.shares(steps),
        "mean_running_while_waiting": run.memory.mean_running(steps),
        "num_steps_while_waiting": len(steps),
    }


def _times(steps: Mapping[str, int]) -> dict[str, float]:
    """Steps that requests took, as four numbers."""
    times = sorted(steps.values())
    if not times:
        return {"mean": 0.0, "median": 0, "p95": 0, "max": 0}
    return {
        "mean": mean(times),
        "median": times[(len(times) - 1) // 2],
        "p95": times[-(-len(times) * 95 // 100) - 1],
        "max": times[-1],
    }


def _spread(steps: Mapping[str, int]) -> str:
    if not steps:
        return "nobody"
    times = _times(steps)
    return (
        f"mean {times['mean']:,.1f}, median {times['median']:,}, 95 % within {times['p95']:,}, "
        f"longest {times['max']:,}"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0 %"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)
