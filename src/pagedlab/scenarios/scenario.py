"""A scenario: a small configuration, some requests and a script of what happens before which step.

``pagedlab-scenario/1`` is the inputs part of ``pagedlab-conformance/1``, so every recording is a
scenario. With ``sampled_token_ids`` it runs without a model, else with one:

    {
      "format": "pagedlab-scenario/1",
      "name": "late", "about": "The second request comes two steps later.",
      "config": {"block_size": 4, "num_blocks": 8, "max_model_len": 32},
      "requests": {
        "r0": {"prompt_token_ids": [1, 2, 3], "max_tokens": 2, "sampled_token_ids": [7, 8]},
        "r1": {"prompt_token_ids": [1, 2, 4], "max_tokens": 1, "sampled_token_ids": [9]}
      },
      "script": [{"before_step": 0, "add": ["r0"]}, {"before_step": 2, "add": ["r1"]}]
    }

A script entry has one action: ``add`` or ``abort`` with ids, or ``reset_prefix_cache``. For a model,
leave ``sampled_token_ids`` out, give ``prompt`` as text if you like, ``sampling`` (fields of
SamplingParams) per request, and ``model`` beside ``config``; null is the embedded one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from pagedlab.config import EngineConfig, SchedulerConfig
from pagedlab.engine.core import EngineCore, Executor
from pagedlab.kv.hashing import request_block_hasher
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig, KVCacheGroupSpec
from pagedlab.request import Request
from pagedlab.sampling_params import SamplingParams
from pagedlab.scenarios.check import check_document
from pagedlab.scenarios.stand_in import ScriptedModel
from pagedlab.sched.scheduler import Scheduler

FORMAT = "pagedlab-scenario/1"


@dataclass(frozen=True)
class Scenario:
    """One document, with its parts at hand.

    Attributes:
        config: fields of EngineConfig, as far as the document gives them, and ``groups``.
        requests: request id -> prompt_token_ids or prompt, max_tokens, sampled_token_ids, …
        script: entries ordered by ``before_step``, each with one action.
        model: what the requests run on if they have no ``sampled_token_ids``; None is the embedded model.
    """

    name: str
    about: str                          # one sentence
    config: dict[str, Any]
    requests: dict[str, dict[str, Any]]
    script: list[dict[str, Any]]
    model: str | None = None

    @classmethod
    def from_document(cls, document: Any, path: str) -> Scenario:
        """Check a document and take it over; without a script all requests come before step 0.

        Raises:
            UserError: a part is missing, misspelled or of the wrong type; the sentence says which.
        """
        check_document(document, path)
        return cls(
            document.get("name") or path,
            document.get("about") or "",
            document["config"],
            document["requests"],
            document.get("script", [{"before_step": 0, "add": list(document["requests"])}]),
            document.get("model"),
        )

    def with_config(self, **changes: Any) -> Scenario:
        """The same story with other knobs; ``model`` is one of them."""
        model = changes.pop("model", self.model)
        return replace(self, model=model, config={**self.config, **changes})

    def with_made_up_tokens(self, encode: Callable[[str], list[int]]) -> Scenario:
        """The same lengths without a model: texts are encoded, and every output has its full length."""
        requests = {}
        for i, (request_id, spec) in enumerate(self.requests.items()):
            first = (i + 1) << 20
            requests[request_id] = {
                **spec,
                "prompt_token_ids": spec.get("prompt_token_ids") or encode(spec["prompt"]),
                "sampled_token_ids": list(range(first, first + (self.sampling_params(request_id).max_tokens or 1))),
            }
        return replace(self, requests=requests)

    @property
    def needs_model(self) -> bool:
        return not all("sampled_token_ids" in request for request in self.requests.values())

    @property
    def last_scripted_step(self) -> int:
        return max((entry["before_step"] for entry in self.script), default=0)

    def engine_config(self) -> EngineConfig:
        """For an engine with a model: what the scenario does not say keeps its default.

        Raises:
            UserError: a value that EngineConfig refuses.
        """
        known = EngineConfig.field_names()
        return EngineConfig(**{k: v for k, v in self.config.items() if k in known} | {"model": self.model})

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

    def sampling_params(self, request_id: str) -> SamplingParams:
        """Greedy unless ``sampling`` says otherwise."""
        spec = self.requests[request_id]
        own = {k: spec[k] for k in ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids") if k in spec}
        return SamplingParams(**{"temperature": 0, **own, **spec.get("sampling", {})})

    def make_request(self, request_id: str) -> Request:
        """A fresh Request as the script adds it; for a scenario that runs without a model."""
        spec = self.requests[request_id]
        caching = self.config.get("enable_prefix_caching", True)
        return Request(
            request_id,
            spec["prompt_token_ids"],
            self.sampling_params(request_id),
            priority=spec.get("priority", 0),
            arrival_time=spec.get("arrival_time", 0.0),
            cache_salt=spec.get("cache_salt"),
            eos_token_id=spec.get("eos_token_id"),
            block_hasher=request_block_hasher(self.config["block_size"]) if caching else None,
            prompt=spec.get("prompt"),
        )


def build_engine_core(scenario: Scenario) -> EngineCore:
    """An engine on the stand-in model, with the scenario's pool and limits."""
    num_prompt_tokens = {request_id: len(spec["prompt_token_ids"]) for request_id, spec in scenario.requests.items()}
    tokens = {request_id: spec["sampled_token_ids"] for request_id, spec in scenario.requests.items()}
    return engine_core_on(ScriptedModel(num_prompt_tokens, tokens), scenario.config)


def engine_core_on(executor: Executor, config: dict[str, Any]) -> EngineCore:
    """A control plane from a scenario's ``config``; without ``groups`` all layers are one full-attention group."""
    whole = [{"layers": ["layer.0"], "kind": "full", "block_size": config["block_size"]}]
    groups = tuple(
        KVCacheGroupSpec(
            tuple(g.get("layers", [f"layer.{i}"])),
            AttentionSpec(g["block_size"], 1, 1, "float32", g.get("sliding_window")),  # no bytes without a model
        )
        for i, g in enumerate(config.get("groups", whole))
    )
    scheduler_config = SchedulerConfig(**{k: config[k] for k in SchedulerConfig.__dataclass_fields__ if k in config})
    caching = config.get("enable_prefix_caching", True)
    scheduler = Scheduler(
        scheduler_config,
        KVCacheConfig(config["num_blocks"], groups),
        block_size=config["block_size"],
        enable_prefix_caching=caching,
    )
    given = {k: v for k, v in config.items() if not isinstance(v, list)}
    shown = {**given, **asdict(scheduler_config), "enable_prefix_caching": caching}  # also what was left to defaults
    return EngineCore(scheduler, executor, about={"model": {}, "config": shown, "tokenizer": {}})
