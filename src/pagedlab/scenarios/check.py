"""Says in one sentence what is wrong with a scenario document, or with the inputs of a recording."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pagedlab.config import EngineConfig
from pagedlab.errors import UserError
from pagedlab.sampling_params import SamplingParams

FORMATS = ("pagedlab-scenario/1", "pagedlab-conformance/1")
PARTS = ("format", "name", "about", "model", "config", "requests", "script")
REQUEST_FIELDS = (
    "prompt", "prompt_token_ids", "sampled_token_ids", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids",
    "eos_token_id", "priority", "arrival_time", "cache_salt", "sampling",
)  # fmt: skip
REQUEST_TYPES = {
    "priority": ((int,), "a whole number"),
    "arrival_time": ((int, float), "a number"),
    "ignore_eos": ((bool,), "true or false"),
    "eos_token_id": ((int, type(None)), "a token id or null"),
    "cache_salt": ((str, type(None)), "text or null"),
    "sampling": ((dict,), "a JSON object"),
}
SAMPLING_FIELDS = tuple(name for name in SamplingParams.__dataclass_fields__ if name != "n")
ACTIONS = ("add", "abort", "reset_prefix_cache")
MAX_STEPS_BETWEEN = 10_000  # from one script entry to the next: the steps between may all be empty
BEYOND = 1 << 63  # whole numbers of a trace have 64 bits
GROUP_FIELDS = ("layers", "kind", "block_size", "sliding_window")


def check_document(document: Any, path: str) -> None:
    """Accept a scenario or a recording.

    Raises:
        UserError: one sentence about the first mistake, with its place.
    """
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a scenario: it must be one JSON object.")
    if document.get("format") not in FORMATS:
        raise UserError(f"{path} has the format {document.get('format')!r}: a scenario says {FORMATS[0]!r}.")
    parts = [("config", dict), ("requests", dict)] + ([("script", list)] if "script" in document else [])
    for part, kind in parts:
        if not isinstance(document.get(part), kind):
            raise UserError(f"{path} has no {part}: it must be a JSON {'object' if kind is dict else 'list'}.")
    if "steps" not in document:  # a recording has more parts: what was decided
        _known(document, PARTS, path)
    for text in ("name", "about", "model"):
        if document.get(text) is not None and not isinstance(document[text], str):
            raise UserError(f"{path}: {text} must be text.")
    if not document["requests"]:
        raise UserError(f"{path} has no request: give at least one.")
    for request_id, spec in document["requests"].items():
        _check_request(spec, f"{path}: request {request_id}")
    runs_alone = _check_mixture(document, path)
    _check_config(document["config"], runs_alone, path)
    _check_script(document.get("script", []), document["requests"], path)
    steps = document.get("steps")
    played = len(steps) if isinstance(steps, list) else 0
    _check_pauses(document.get("script", []), max(MAX_STEPS_BETWEEN, played), path)


def _check_request(spec: Any, where: str) -> None:
    if not isinstance(spec, dict):
        raise UserError(f"{where} must be a JSON object.")
    _known(spec, REQUEST_FIELDS, where)
    if "prompt" not in spec and "prompt_token_ids" not in spec:
        raise UserError(f"{where} has no prompt: give a prompt or prompt_token_ids.")
    if "prompt" in spec and not isinstance(spec["prompt"], str):
        raise UserError(f"{where}: prompt must be text.")
    for name in ("prompt_token_ids", "sampled_token_ids", "stop_token_ids"):
        ids = spec.get(name, [])
        if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < BEYOND for i in ids):
            raise UserError(f"{where}: {name} must be a list of whole numbers of 0 or more, in 63 bits.")
    if "sampled_token_ids" in spec and "prompt_token_ids" not in spec:
        raise UserError(f"{where} has sampled_token_ids and so no tokenizer: give prompt_token_ids as well.")
    for name, (kinds, what) in REQUEST_TYPES.items():
        if name in spec and (type(spec[name]) not in kinds or _is_beyond(spec[name])):
            raise UserError(f"{where}: {name} must be {what}.")
    sampling = spec.get("sampling", {})
    _known(sampling, SAMPLING_FIELDS, f"{where}: sampling")
    limits = {name: spec[name] for name in ("max_tokens", "min_tokens") if name in spec}
    _with_place(lambda: SamplingParams(**{**limits, **sampling}), where)


def _is_beyond(value: Any) -> bool:
    """No 64 bits hold the number, or no UTF-8 the text."""
    if isinstance(value, str):
        return any("\ud800" <= char <= "\udfff" for char in value)
    return isinstance(value, int) and not -BEYOND < value < BEYOND


def _check_mixture(document: dict[str, Any], path: str) -> bool:
    """All requests are scripted, or none is; True if they are."""
    scripted = [request_id for request_id, spec in document["requests"].items() if "sampled_token_ids" in spec]
    if not scripted:
        return False
    if len(scripted) < len(document["requests"]):
        missing = next(request_id for request_id in document["requests"] if request_id not in scripted)
        raise UserError(
            f"{path}: request {missing} has no sampled_token_ids and request {scripted[0]} has some: "
            "give them to all requests (no model runs) or to none."
        )
    return True


def _check_config(config: dict[str, Any], runs_alone: bool, path: str) -> None:
    where = f"{path}: config"
    settings = tuple(name for name in EngineConfig.field_names() if name != "model")
    _known(config, (*settings, "groups"), where)
    if runs_alone:
        for name in ("block_size", "num_blocks"):
            if config.get(name) is None:
                raise UserError(f"{where} has no {name}: without a model there is nothing to take it from.")
    elif "groups" in config:
        raise UserError(f"{where} has groups, but the model decides them: leave groups out, or give sampled_token_ids.")
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        if not isinstance(config.get(name, True), bool):
            raise UserError(f"{where}: {name} must be true or false.")
    _with_place(lambda: EngineConfig(**{k: v for k, v in config.items() if k != "groups"}), where)
    if "groups" in config:
        _check_groups(config["groups"], config["block_size"], where)


def _check_groups(groups: Any, hash_block_size: int, where: str) -> None:
    if not isinstance(groups, list) or not groups or not all(isinstance(group, dict) for group in groups):
        raise UserError(f"{where}: groups must be a list of JSON objects with a kind and a block_size.")
    for i, group in enumerate(groups):
        place = f"{where}: group {i}"
        _known(group, GROUP_FIELDS, place)
        size, window, kind = group.get("block_size"), group.get("sliding_window"), group.get("kind")
        layers = group.get("layers", ["any"])
        if not isinstance(layers, list) or not layers or not all(isinstance(name, str) for name in layers):
            raise UserError(f"{place} has layers {layers!r}: give a list of names, or leave it out.")
        if type(size) is not int or size < 1 or size % hash_block_size:
            raise UserError(f"{place} has block_size {size!r}: give a multiple of the block_size {hash_block_size}.")
        if kind not in ("full", "sliding_window"):
            raise UserError(f"{place} has the kind {kind!r}: choose full or sliding_window.")
        if kind == "full" and window is not None:
            raise UserError(f"{place} is full and has a sliding_window: leave the window out or change the kind.")
        if kind == "sliding_window" and (type(window) is not int or window < 1):
            raise UserError(f"{place} has sliding_window {window!r}: give the window in tokens.")


def _check_script(script: list[Any], requests: dict[str, Any], path: str) -> None:
    latest = 0
    for i, entry in enumerate(script):
        where = f"{path}: script entry {i}"
        if not isinstance(entry, dict):
            raise UserError(f"{where} must be a JSON object.")
        _known(entry, ("before_step", *ACTIONS), where)
        step = entry.get("before_step")
        if type(step) is not int or step < 0:
            raise UserError(f"{where} has before_step {step!r}: give the number of a step, 0 or more.")
        if step < latest:
            raise UserError(f"{where} comes before step {step}, after an entry for step {latest}: order them by step.")
        latest = step
        actions = [action for action in ACTIONS if action in entry]
        if len(actions) != 1:
            raise UserError(f"{where} has {len(actions)} actions: give exactly one of {', '.join(ACTIONS)}.")
        if actions[0] == "reset_prefix_cache":
            if entry["reset_prefix_cache"] is not True:
                raise UserError(f"{where}: reset_prefix_cache must be true.")
            continue
        ids = entry[actions[0]]
        if not isinstance(ids, list) or not ids:
            raise UserError(f"{where}: {actions[0]} must be a list of request ids.")
        for request_id in ids:
            if not isinstance(request_id, str) or request_id not in requests:
                raise UserError(f"{where} names request {request_id!r}, which is not among the requests.")
    if script and not any("add" in entry for entry in script):
        raise UserError(f"{path}: the script adds no request, so nothing would happen.")


def _check_pauses(script: list[dict[str, Any]], most: int, path: str) -> None:
    """A mistyped step would play empty steps without end; as many as a recording has were played once."""
    latest = 0
    for i, entry in enumerate(script):
        step = entry["before_step"]
        if step - latest > most:
            after = f"step {latest:,}, where the entry before it stands" if i else "the first step"
            raise UserError(
                f"{path}: script entry {i} comes before step {step:,}, {step - latest:,} steps after {after}: "
                f"leave at most {most:,} steps between."
            )
        latest = step


def _known(given: dict[str, Any], allowed: Iterable[str], where: str) -> None:
    allowed = tuple(allowed)
    for name in given:
        if name not in allowed:
            raise UserError(f"{where} has an unknown field {name!r}: known ones are {', '.join(allowed)}.")


def _with_place(construct: Any, where: str) -> None:
    """Let a configuration class check its own values, and say where they stand."""
    try:
        construct()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
