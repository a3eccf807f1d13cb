"""A scenario: a small configuration, some requests and a script of what happens before which step.

``pagedlab-scenario/1`` is the inputs part of ``pagedlab-conformance/1``, so every recording is a
scenario. With ``sampled_token_ids`` it runs without a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedlab.config import SchedulerConfig
from pagedlab.engine.core import EngineCore
from pagedlab.errors import UserError
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.scenarios.stand_in import ScriptedModel
from pagedlab.sched.scheduler import Scheduler


@dataclass(frozen=True)
class Scenario:
    """One document, with its parts at hand."""

    name: str
    about: str                          # one sentence
    config: dict[str, Any]
    requests: dict[str, dict[str, Any]]
    script: list[dict[str, Any]]

    @classmethod
    def from_document(cls, document: dict[str, Any], path: str) -> Scenario:
        """Check the shape of a document.

        Raises:
            UserError: a part is missing or of the wrong type.
        """
        for key, kind in (("config", dict), ("requests", dict), ("script", list)):
            if not isinstance(document.get(key), kind):
                raise UserError(f"{path} has no {key}: it is not a scenario.")
        return cls(
            document.get("name", path), document.get("about", ""), document["config"], document["requests"],
            document["script"],
        )

    def actions_before(self, step: int) -> list[tuple[str, str]]:
        """(add, abort or reset_prefix_cache; request id) in order."""
        actions = []
        for entry in self.script:
            if entry["before_step"] == step:
                for action in ("add", "abort"):
                    actions += [(action, request_id) for request_id in entry.get(action, ())]
                if entry.get("reset_prefix_cache"):
                    actions.append(("reset_prefix_cache", ""))
        return actions

    def make_request(self, request_id: str) -> Request:
        """A fresh Request as the script adds it."""
        spec = self.requests[request_id]
        params = SamplingParams(
            temperature=0, max_tokens=spec.get("max_tokens", 16), ignore_eos=spec.get("ignore_eos", False),
            stop_token_ids=spec.get("stop_token_ids", ()), min_tokens=spec.get("min_tokens", 0),
        )
        caching = self.config.get("enable_prefix_caching", True)
        return Request(
            request_id, spec["prompt_token_ids"], params, priority=spec.get("priority", 0),
            arrival_time=spec.get("arrival_time", 0.0), cache_salt=spec.get("cache_salt"),
            eos_token_id=spec.get("eos_token_id"),
            block_hasher=request_block_hasher(self.config["block_size"]) if caching else None,
        )


def build_engine_core(scenario: Scenario) -> EngineCore:
    """An engine on the stand-in model, with the scenario's pool and limits."""
    config = scenario.config
    groups = tuple(
        KVCacheGroupSpec(tuple(g["layers"]), AttentionSpec(g["block_size"], 1, 1, "float32", g["sliding_window"]))
        for g in config["groups"]
    )
    scheduler = Scheduler(
        SchedulerConfig(**{k: config[k] for k in SchedulerConfig.__dataclass_fields__ if k in config}),
        KVCacheConfig(config["num_blocks"], groups),
        block_size=config["block_size"],
        enable_prefix_caching=config["enable_prefix_caching"],
    )
    model = ScriptedModel(
        {request_id: len(spec["prompt_token_ids"]) for request_id, spec in scenario.requests.items()},
        {request_id: spec["sampled_token_ids"] for request_id, spec in scenario.requests.items()},
    )
    shown = {k: v for k, v in config.items() if not isinstance(v, list)}
    return EngineCore(scheduler, model, about={"model": {}, "config": shown, "tokenizer": {}})
