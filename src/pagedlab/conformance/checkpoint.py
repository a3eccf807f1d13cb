"""Replays a checkpoint folder: the same weights give the same greedy tokens and, within noise, logits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from pagedlab.config import EngineConfig
from pagedlab.conformance.report import Outcome
from pagedlab.conformance.single_engine import Document, build_engine, one_thread
from pagedlab.errors import UserError
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.models.config import ModelConfig
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import TopLogprobs
from pagedlab.wording import plural
from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.sampler import Sampler

CASE_FIELDS = {
    "name": str, "max_new_tokens": int, "prompt_token_ids": list, "greedy_token_ids": list, "greedy_logits": list,
    "last_prompt_top5_token_ids": list,
}  # fmt: skip
LOGIT_TOLERANCE = 1e-3  # absolute; the references differ by up to 8.5e-5 among themselves

# Every prompt alone; all together with room; all together in 29 usable blocks with 40 tokens a step
# and six seats, so that prompts are chunked and requests preempted.
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1, "num_blocks": 257, "max_num_batched_tokens": 2048},
    "batched": {"max_num_seqs": 64, "num_blocks": 2049, "max_num_batched_tokens": 2048},
    "tight": {"max_num_seqs": 6, "num_blocks": 30, "max_num_batched_tokens": 40},
}


def replay_checkpoint(directory: Path) -> list[Outcome]:
    """All prompts of ``expected.json``, in each of the ways.

    Raises:
        UserError: the folder holds no checkpoint, or its ``expected.json`` is none.
    """
    model_dir = directory / "checkpoint"
    if not (model_dir / "config.json").is_file():
        raise UserError(f"{directory} has an expected.json but no checkpoint/config.json beside it.")
    try:
        document = json.loads((directory / "expected.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{directory}/expected.json cannot be read ({error}).") from None
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list) or not cases or not all(map(_is_case, cases)):
        raise UserError(f"{directory}/expected.json has no cases with proper {', '.join(sorted(CASE_FIELDS))}.")
    config = ModelConfig.from_directory(model_dir)
    for case in cases:
        prompt, length = case["prompt_token_ids"], len(case["prompt_token_ids"]) + case["max_new_tokens"]
        if max(prompt) >= config.vocab_size or length > config.max_position_embeddings:
            raise UserError(f"{directory}/expected.json: {case['name']} is beyond the model's vocabulary or length.")
    logits_file = directory / "last_prompt_logits.safetensors"
    last_prompt_logits = load_file(logits_file) if logits_file.is_file() else {}
    with one_thread():
        outcomes = [_replay(directory, model_dir, cases, last_prompt_logits, way) for way in WAYS]
    if (directory / "config_rope_parameters.json").is_file():
        outcomes.append(_compare_spelling(directory, model_dir))
    return outcomes


def _is_case(case: Any) -> bool:
    return (
        isinstance(case, dict)
        and all(type(case.get(field)) is kind for field, kind in CASE_FIELDS.items())
        and case["max_new_tokens"] > 0
        and len(case["prompt_token_ids"]) > 0
        and all(type(i) is int and i >= 0 for i in case["prompt_token_ids"])
    )


@dataclass
class Difference:
    """The largest so far, and the first that is too large."""

    largest: float = 0.0
    first: Document | None = None

    def hold(self, field: str, expected: Any, got: Any, distance: float | None = None) -> None:
        """Values that must be equal, or, with a ``distance``, within the tolerance."""
        self.largest = max(self.largest, distance or 0.0)
        wrong = expected != got if distance is None else not distance <= LOGIT_TOLERANCE
        if wrong and self.first is None:
            self.first = {"step": None, "field": field, "expected": expected, "got": got}


def _replay(
    directory: Path, model_dir: Path, cases: list[Document], last_prompt_logits: dict[str, Tensor], way: str
) -> Outcome:
    longest = max(len(case["prompt_token_ids"]) + case["max_new_tokens"] for case in cases)
    config = EngineConfig(device="cpu", max_model_len=longest, **WAYS[way])
    one_request = -(-longest // config.block_size) + 1  # blocks, null block included
    assert config.num_blocks is not None
    config = replace(config, num_blocks=max(config.num_blocks, one_request))
    tokens, logits = generate(model_dir, cases, config)
    difference = Difference()
    for case in cases:
        name = case["name"]
        difference.hold(f"{name}.greedy_token_ids", case["greedy_token_ids"], tokens[name])
        top = logits[name][0].topk(len(case["last_prompt_top5_token_ids"])).indices.tolist()
        difference.hold(f"{name}.last_prompt_top5_token_ids", case["last_prompt_top5_token_ids"], top)
        if name in last_prompt_logits:
            distance = (logits[name][0] - last_prompt_logits[name]).abs()
            at = int(distance.argmax())
            expected, got = float(last_prompt_logits[name][at]), float(logits[name][0][at])
            difference.hold(f"{name}.last_prompt_logits[{at}]", expected, got, float(distance[at]))
        for i, (expected, row) in enumerate(zip(case["greedy_logits"], logits[name], strict=False)):
            got = float(row.max())
            difference.hold(f"{name}.greedy_logits[{i}]", expected, got, abs(expected - got))
    num_tokens = sum(len(case["greedy_token_ids"]) for case in cases)
    about = (
        f"{plural(len(cases), 'prompt')}, {plural(num_tokens, 'token')}; "
        f"largest difference of a logit {difference.largest:.1e}"
    )
    first = difference.first
    report = f"  {first['field']}: expected {first['expected']!r}, got {first['got']!r}" if first else ""
    name = f"{directory.name}/{way}"
    return Outcome(name, str(directory), "checkpoint", "strict", first is None, first, report, about)


def _compare_spelling(directory: Path, model_dir: Path) -> Outcome:
    """The newer spelling of the config describes the same RoPE."""
    path = directory / "config_rope_parameters.json"
    newer = ModelConfig.from_dict(dict(json.loads(path.read_text())), where=str(path)).rope_theta
    theta = ModelConfig.from_directory(model_dir).rope_theta
    first = None if newer == theta else {"step": None, "field": "rope_theta", "expected": theta, "got": newer}
    report = f"  rope_theta: expected {theta}, got {newer}" if first else ""
    about = "config.json and config_rope_parameters.json give the same RoPE base"
    return Outcome(f"{directory.name}/spelling", str(path), "checkpoint", "strict", first is None, first, report, about)


class LogitsRecorder(Sampler):
    """Keeps the raw logits of every token that was kept."""

    def __init__(self, sampler: Sampler) -> None:
        self.eos_token_ids, self.generator, self.token_text = sampler.eos_token_ids, sampler.generator, None
        self.logits: dict[str, list[Tensor]] = {}  # request -> [vocab] float32 per output token

    def sample(
        self, logits: Tensor, requests: Sequence[CachedRequestState], is_discarded: Sequence[bool]
    ) -> tuple[list[int], dict[str, TopLogprobs]]:
        for request, row, discarded in zip(requests, logits, is_discarded, strict=True):
            if not discarded:
                self.logits.setdefault(request.req_id, []).append(row.float().cpu().clone())
        return super().sample(logits, requests, is_discarded)


def generate(
    model_dir: Path, cases: Iterable[Document], config: EngineConfig
) -> tuple[dict[str, list[int]], dict[str, list[Tensor]]]:
    """Greedy tokens and their logits, by case name; end-of-text is ignored."""
    scheduler, worker = build_engine(model_dir, config)
    recorder = worker.runner.sampler = LogitsRecorder(worker.runner.sampler)
    tokens: dict[str, list[int]] = {}
    hasher = request_block_hasher(config.block_size)
    for case in cases:
        params = SamplingParams(temperature=0, max_tokens=case["max_new_tokens"], ignore_eos=True)
        scheduler.add_request(Request(case["name"], case["prompt_token_ids"], params, block_hasher=hasher))
        tokens[case["name"]] = []
    while scheduler.requests:
        message = scheduler.schedule()
        for output in scheduler.update_from_output(message, worker.execute_model(message)):
            tokens[output.request_id] += output.new_token_ids
    return tokens, recorder.logits
