"""``pagedlab scenario-from``: a trace as a small scenario that reproduces its decisions.

What the model said becomes a script, so the scenario runs without a model and fits a bug report.
"""

from __future__ import annotations

from typing import Any

from pagedlab.config import EngineConfig
from pagedlab.errors import UserError
from pagedlab.trace.events import (
    EngineSnapshot,
    Event,
    PrefixCacheReset,
    RequestAborted,
    RequestAdded,
    RequestFinished,
    RequestOutput,
)
from pagedlab.trace.trace import Trace
from pagedlab.wording import plural

# What decides; the rest of EngineConfig is about the model's half.
_CONFIG = (
    "block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "long_prefill_token_threshold", "policy", "enable_prefix_caching", "enable_chunked_prefill",
)  # fmt: skip


def scenario_from(trace: Trace, *, anonymise: bool = False, name: str = "from-trace") -> dict[str, Any]:
    """A ``pagedlab-scenario/1`` document; ``anonymise`` replaces ids, tokens and salts by numbers.

    Raises:
        UserError: the trace does not begin with a fresh engine, or misses what a scenario needs.
    """
    snapshot = trace.first_snapshot
    if snapshot is None:
        raise UserError("this trace saw no engine, so there is nothing to make a scenario of.")
    if snapshot.requests or snapshot.cached_blocks or snapshot.free_queue != list(range(1, snapshot.num_blocks)):
        raise UserError("this trace begins in the middle of a run: record one from a fresh engine on.")
    events = [e for e in trace if e.engine == trace.engine]
    config = _config(trace, snapshot)
    requests = _requests(events, config)
    if not requests:
        raise UserError("no request entered in this trace, so there is nothing to make a scenario of.")
    document = {
        "format": "pagedlab-scenario/1",
        "name": name,
        "about": f"{plural(len(requests), 'request')} over {plural(max(trace.steps) + 1, 'step')}, "
                 "as one trace recorded them.",
        "config": config,
        "requests": requests,
        "script": _script(events),
    }
    return _anonymised(document) if anonymise else document


def _config(trace: Trace, snapshot: EngineSnapshot) -> dict[str, Any]:
    known = trace.header.config
    defaults = EngineConfig()
    config = {key: known.get(key, getattr(defaults, key)) for key in _CONFIG}
    config["num_blocks"] = snapshot.num_blocks
    config["block_size"] = known.get("block_size") or min(snapshot.block_sizes)
    if config["max_model_len"] is None:
        raise UserError("the header does not say max_model_len, which decides when requests end.")
    windows = snapshot.sliding_windows
    if len(windows) > 1 or any(windows):
        config["groups"] = [
            {"kind": "full", "block_size": size} if window is None else
            {"kind": "sliding_window", "block_size": size, "sliding_window": window}
            for size, window in zip(snapshot.block_sizes, windows, strict=True)
        ]
    return config


def _requests(events: list[Event], config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each request with all it said, and filler where it was ended from outside or outlives the trace."""
    requests: dict[str, dict[str, Any]] = {}
    for e in events:
        if type(e) is RequestAdded:
            asked = e.sampling
            spec: dict[str, Any] = {"prompt_token_ids": e.prompt_token_ids, "sampled_token_ids": [],
                                    "arrival_time": e.arrival_time}
            spec["max_tokens"] = asked.get("max_tokens") or config["max_model_len"]
            for key in ("min_tokens", "ignore_eos", "stop_token_ids", "eos_token_id"):
                if asked.get(key):
                    spec[key] = asked[key]
            if e.priority:
                spec["priority"] = e.priority
            if e.cache_salt is not None:
                spec["cache_salt"] = e.cache_salt
            if asked.get("prompt_logprobs") is not None:
                spec["sampling"] = {"prompt_logprobs": asked["prompt_logprobs"]}
            requests[e.request_id] = spec
        elif type(e) is RequestOutput and e.request_id in requests:
            requests[e.request_id]["sampled_token_ids"] += e.new_token_ids
    complete = {e.request_id for e in events if type(e) is RequestFinished and e.finish_reason in ("stop", "length")}
    for request_id, spec in requests.items():
        if request_id in complete:
            continue
        ends = {spec.get("eos_token_id"), *spec.get("stop_token_ids", ())}
        filler = next(t for t in range(len(ends) + 1) if t not in ends)
        spec["sampled_token_ids"] += [filler] * (spec["max_tokens"] - len(spec["sampled_token_ids"]))
    return requests


def _script(events: list[Event]) -> list[dict[str, Any]]:
    """What came from outside, before which step."""
    script: list[dict[str, Any]] = []
    for e in events:
        if type(e) is PrefixCacheReset:
            script.append({"before_step": e.step + 1, "reset_prefix_cache": True})
        elif type(e) is RequestAdded or type(e) is RequestAborted:
            action = "add" if type(e) is RequestAdded else "abort"
            if script and script[-1]["before_step"] == e.step + 1 and action in script[-1]:
                script[-1][action].append(e.request_id)
            else:
                script.append({"before_step": e.step + 1, action: [e.request_id]})
    return script


def _anonymised(document: dict[str, Any]) -> dict[str, Any]:
    """Other ids in the same textual order (the priority policy compares them), tokens counted as they appear."""
    ids = sorted(document["requests"])
    width = len(str(len(ids) - 1))
    names = {request_id: f"r{i:0{width}d}" for i, request_id in enumerate(ids)}
    tokens: dict[int, int] = {}
    salts: dict[str, str] = {}

    def token(token_id: int) -> int:
        return tokens.setdefault(token_id, len(tokens))

    requests = {}
    for request_id, spec in document["requests"].items():
        new = dict(spec)
        for key in ("prompt_token_ids", "sampled_token_ids", "stop_token_ids"):
            if key in spec:
                new[key] = [token(t) for t in spec[key]]
        if "eos_token_id" in spec:
            new["eos_token_id"] = token(spec["eos_token_id"])
        if "cache_salt" in spec:
            new["cache_salt"] = salts.setdefault(spec["cache_salt"], f"salt{len(salts)}")
        requests[names[request_id]] = new
    script = [
        {key: [names[i] for i in value] if isinstance(value, list) else value for key, value in entry.items()}
        for entry in document["script"]
    ]
    return {**document, "requests": requests, "script": script}
