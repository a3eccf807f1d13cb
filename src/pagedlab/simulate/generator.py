"""Seeded workloads: named generators made of named distributions.

A distribution is written ``fixed:N``, ``uniform:LOW:HIGH``, ``lognormal:MEAN:SIGMA`` (sigma of the
logarithm) or ``exponential:MEAN``; arrivals are ``at-once``, ``every:STEPS``, ``poisson:RATE`` (requests
a step) or ``bursts:SIZE:STEPS``. The same seed gives the same workload.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pagedlab.errors import UserError
from pagedlab.simulate.workload import MAX_TOKENS, SimulatedRequest, Workload, mean
from pagedlab.wording import plural

DEFAULT_GENERATOR = "sharegpt-like"
DEFAULT_NUM_REQUESTS = 1000
LARGEST_EXPONENT = 700.0  # of e, in a float; any such length is drawn again
Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class Generator:
    """A named mixture; each part may be replaced on the command line."""

    about: str
    prompt_lengths: str            # a distribution
    output_lengths: str
    arrivals: str
    prefix_groups: int = 0         # requests fall into so many groups, evenly …
    prefix_tokens: int = 0         # … each with a common prefix of so many tokens, part of the prompt
    most_prompt_tokens: int = MAX_TOKENS - 1  # longer draws are drawn again


GENERATORS = {
    "sharegpt-like": Generator(
        "a stand-in for ShareGPT, whose lengths are not at hand: log-normal lengths with the means the "
        "PagedAttention paper gives (prompts 161, outputs 338), prompts up to 1,024 tokens",
        prompt_lengths="lognormal:161:1.1", output_lengths="lognormal:338:0.9", arrivals="poisson:0.2",
        most_prompt_tokens=1024,
    ),
    "alpaca-like": Generator(
        "a stand-in for Alpaca, whose lengths are not at hand: log-normal lengths with the means the "
        "PagedAttention paper gives (prompts 19, outputs 58)",
        prompt_lengths="lognormal:19:0.6", output_lengths="lognormal:58:0.9", arrivals="poisson:3",
    ),
    "uniform": Generator(
        "lengths uniform in ranges, everything at once, as an offline benchmark does it",
        prompt_lengths="uniform:32:512", output_lengths="uniform:16:256", arrivals="at-once",
    ),
    "fixed": Generator(
        "equal requests, all at once", prompt_lengths="fixed:128", output_lengths="fixed:128", arrivals="at-once"
    ),
    "system-prompts": Generator(
        "four system prompts of 512 tokens, each followed by a question of its own",
        prompt_lengths="uniform:544:768", output_lengths="lognormal:120:0.7", arrivals="poisson:0.6",
        prefix_groups=4, prefix_tokens=512,
    ),
    "bursts": Generator(
        "bursts of 64 short requests every 200 steps",
        prompt_lengths="lognormal:64:0.8", output_lengths="lognormal:64:0.8", arrivals="bursts:64:200",
    ),
}  # fmt: skip


def generate(
    name: str,
    *,
    max_model_len: int,
    num_requests: int | None = None,
    seed: int | None = None,
    prompt_lengths: str | None = None,
    output_lengths: str | None = None,
    arrivals: str | None = None,
    prefix_groups: int | None = None,
    prefix_tokens: int | None = None,
) -> Workload:
    """Draw a workload; whatever is given replaces the generator's own part.

    Requests longer than ``max_model_len`` in all, or shorter than the common prefix, are drawn again.

    Raises:
        UserError: an unknown name, a malformed distribution, or one that hardly draws such lengths.
    """
    if name not in GENERATORS:
        raise UserError(f"there is no generator {name!r}: choose one of {', '.join(GENERATORS)}.")
    changes: dict[str, Any] = {
        "prompt_lengths": prompt_lengths, "output_lengths": output_lengths, "arrivals": arrivals,
        "prefix_groups": prefix_groups, "prefix_tokens": prefix_tokens,
    }  # fmt: skip
    changes = {part: value for part, value in changes.items() if value is not None}
    parts = replace(GENERATORS[name], **changes)
    if parts.prefix_groups < 0 or parts.prefix_tokens < 0 or bool(parts.prefix_groups) != bool(parts.prefix_tokens):
        raise UserError("give both prefix groups and prefix tokens, or neither, as positive numbers.")
    num_requests = DEFAULT_NUM_REQUESTS if num_requests is None else num_requests
    seed = seed or 0
    rng = random.Random(seed)
    lengths = _draw_lengths(parts, num_requests, max_model_len, rng)
    steps = _arrival_steps(parts.arrivals, num_requests, rng)
    requests = [
        SimulatedRequest(
            f"r{i}",
            step,
            num_prompt,
            num_output,
            prefix_group=str(i % parts.prefix_groups) if parts.prefix_groups else None,
            num_prefix_tokens=parts.prefix_tokens,
        )
        for i, (step, (num_prompt, num_output)) in enumerate(zip(steps, lengths, strict=True))
    ]
    drawn = (
        f"{plural(num_requests, 'request')}, seed {seed}: prompts {parts.prompt_lengths}, on average "
        f"{mean([p for p, _ in lengths]):.0f} tokens; outputs {parts.output_lengths}, on average "
        f"{mean([o for _, o in lengths]):.0f}; arrivals {parts.arrivals}"
    )
    story = GENERATORS[name].about if not changes else f"{GENERATORS[name].about} (changed: {', '.join(changes)})"
    return Workload(name, f"{story}; {drawn}", requests)


def _draw_lengths(parts: Generator, count: int, max_model_len: int, rng: random.Random) -> list[tuple[int, int]]:
    draw_prompt, draw_output = _distribution(parts.prompt_lengths), _distribution(parts.output_lengths)
    lengths = []
    for _ in range(count):
        for _ in range(1000):
            num_prompt, num_output = max(1, round(draw_prompt(rng))), max(1, round(draw_output(rng)))
            fits = num_prompt <= parts.most_prompt_tokens and num_prompt + num_output <= max_model_len
            if fits and num_prompt >= parts.prefix_tokens:
                break
        else:
            room = f"hold the {parts.prefix_tokens} tokens of their prefix and " if parts.prefix_tokens else ""
            raise UserError(
                f"prompts {parts.prompt_lengths} with outputs {parts.output_lengths} hardly ever {room}fit "
                f"max_model_len {max_model_len}: draw other lengths or raise it."
            )
        lengths.append((num_prompt, num_output))
    return lengths


def _distribution(text: str) -> Draw:
    """``uniform:32:512`` as a function that draws."""
    name, *numbers = _parse(text, {"fixed": 1, "uniform": 2, "lognormal": 2, "exponential": 1})
    if name == "fixed":
        return lambda rng: numbers[0]
    if name == "uniform":
        low, high = numbers
        if low > high:
            raise UserError(f"the distribution {text!r} ends before it begins: give uniform:LOW:HIGH.")
        return lambda rng: rng.uniform(low, high)
    if name == "exponential":
        return lambda rng: rng.expovariate(1 / numbers[0])
    middle, sigma = numbers
    return lambda rng: math.exp(min(rng.normalvariate(math.log(middle) - sigma**2 / 2, sigma), LARGEST_EXPONENT))


def _arrival_steps(text: str, count: int, rng: random.Random) -> list[int]:
    name, *numbers = _parse(text, {"at-once": 0, "every": 1, "poisson": 1, "bursts": 2})
    if name == "at-once":
        return [0] * count
    if name == "every":
        return [int(i * numbers[0]) for i in range(count)]
    if name == "bursts":
        return [int(i // numbers[0] * numbers[1]) for i in range(count)]
    now, steps = 0.0, []
    for _ in range(count):
        now += rng.expovariate(numbers[0])
        steps.append(int(now))
    return steps


def _parse(text: str, known: dict[str, int]) -> tuple[Any, ...]:
    """(name, number, …) with as many positive numbers as the name wants."""
    name, *given = text.split(":")
    shapes = ", ".join(":".join([n, *["N"] * k]) for n, k in known.items())
    if name not in known or len(given) != known[name]:
        raise UserError(f"{text!r} is none of {shapes}.")
    try:
        numbers = [float(number) for number in given]
    except ValueError:
        raise UserError(f"{text!r} has something that is not a number: give one of {shapes}.") from None
    if any(not number > 0 for number in numbers):
        raise UserError(f"{text!r} has a number that is not positive.")
    if any(not 1e-9 <= number <= 1e9 for number in numbers):
        raise UserError(f"{text!r} has a number that is not between 1e-9 and 1e9.")
    return (name, *numbers)
