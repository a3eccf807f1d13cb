"""Offline throughput: how many tokens per second a batch of requests gets, and where the time goes.

As this field measures it (vllm bench throughput): all requests are there at the beginning, prompts
are random token ids, lengths are uniform in ranges, end-of-text is ignored, everything is seeded.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from pagedlab.engine.llm import LLM
from pagedlab.errors import UserError
from pagedlab.sampling_params import SamplingParams

OUTER_STAGES = ("add_request", "schedule", "execute_model", "update_from_output")
INNER_STAGES = ("prepare_inputs", "forward", "sample")  # parts of execute_model


@dataclass(frozen=True)
class Workload:
    """Requests as they are drawn: prompt ids, and how many tokens each shall produce."""

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def draw(
        cls, *, num_prompts: int, input_len: tuple[int, int], output_len: tuple[int, int], vocab_size: int, seed: int
    ) -> Workload:
        """Lengths uniform in the ranges, both ends included, then ids uniform in the vocabulary."""
        rng = random.Random(seed)
        lens = [(rng.randint(*input_len), rng.randint(*output_len)) for _ in range(num_prompts)]
        prompts = [[rng.randrange(vocab_size) for _ in range(num_in)] for num_in, _ in lens]
        return cls(prompts, [num_out for _, num_out in lens])

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


@dataclass
class Run:
    """One run over the workload; the stages are timed by the engine itself, traced or not."""

    seconds: float
    num_steps: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    decode_seconds: dict[int, list[float]] = field(default_factory=dict)  # requests -> steps in which they all decode


def run_engine(llm: LLM, workload: Workload) -> Run:
    """Give the engine all requests at once, and step until the last one is done."""
    llm.reset_prefix_cache()  # an earlier run over the same prompts must not help
    stage_ns: Counter[str] = Counter()
    num_steps = num_tokens = 0
    start = time.perf_counter()
    for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True):
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        llm.add_request(prompt, params, kind="final_only")
    added = time.perf_counter()
    decode_seconds: dict[int, list[float]] = {}
    with llm.interrupts:
        while llm.has_unfinished_requests():
            num_decodes, step_start = _num_decodes(llm), time.perf_counter()
            num_tokens += sum(len(output.outputs[0].token_ids) for output in llm.step())
            if num_decodes:
                decode_seconds.setdefault(num_decodes, []).append(time.perf_counter() - step_start)
            stage_ns.update(llm.core.stage_ns)
            stage_ns.update(getattr(llm.core.executor, "stage_ns", {}))
            num_steps += 1
    seconds = time.perf_counter() - start
    if num_tokens != workload.num_output_tokens:
        raise RuntimeError(f"{num_tokens} tokens came out, {workload.num_output_tokens} were asked for")
    stages = {"add_request": added - start, **{name: ns / 1e9 for name, ns in stage_ns.items()}}
    return Run(seconds, num_steps, stages, decode_seconds)


def _num_decodes(llm: LLM) -> int:
    """Running requests if the next step gives each of them one token and nobody waits, else 0."""
    scheduler = llm.core.scheduler
    if len(scheduler.waiting) or any(r.num_tokens - r.num_computed_tokens != 1 for r in scheduler.running):
        return 0
    return len(scheduler.running)


def check_fits(llm: LLM, input_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    """The longest request must fit, or something else than was asked for would be measured.

    Raises:
        UserError: it does not.
    """
    longest = input_len[1] + output_len[1]
    if longest > llm.max_model_len:
        raise UserError(
            f"requests may have {input_len[1]} + {output_len[1]} = {longest} tokens, but max_model_len is "
            f"{llm.max_model_len}: ask for shorter ones, or raise --max-model-len and the pool."
        )
