"""The knobs that ``trace``, ``generate`` and, but for sampling, ``bench`` share, spelled once.

An option that is not given stays None, so that a scenario's own configuration, or a command's
default, can tell it from one that is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from pagedlab.config import EngineConfig
from pagedlab.sampling_params import SamplingParams

_ENGINE, _SAMPLING = "Engine", "Sampling"
DEFAULT_MAX_TOKENS = 32  # of the command line; SamplingParams itself has vLLM's 16


@dataclass(frozen=True)
class Knobs:
    """What was given on the command line, under the names of the Python fields."""

    engine: dict[str, Any]
    sampling: dict[str, Any]

    def engine_config(self, **defaults: Any) -> EngineConfig:
        """``defaults`` hold where the command line says nothing."""
        return EngineConfig(**{**defaults, **self.engine})

    def sampling_params(self, **defaults: Any) -> SamplingParams:
        """Greedy and 32 tokens, unless ``defaults`` or the command line say otherwise."""
        return SamplingParams(**{"temperature": 0.0, "max_tokens": DEFAULT_MAX_TOKENS, **defaults, **self.sampling})


def takes_knobs(command: Callable[..., None], *, but: Collection[str] = ()) -> Callable[..., None]:
    """Give a typer command every knob as an option; it receives them as its argument ``knobs``."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    options = {n: p for n, p in inspect.signature(_options, eval_str=True).parameters.items() if n not in but}

    @functools.wraps(command)
    def with_knobs(**given: Any) -> None:
        engine, sampling = _options(**{name: given.pop(name) for name in options})
        command(**given, knobs=Knobs(engine, sampling))

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own if p.name != "knobs"]
    parameters += options.values()
    with_knobs.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_knobs.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_knobs


def takes_engine_knobs(command: Callable[..., None]) -> Callable[..., None]:
    """The same for a command that chooses lengths and tokens itself; the seed stays."""
    return takes_knobs(command, but={field.name for field in fields(SamplingParams)} - {"seed"})


def _engine(name: str, help_text: str) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=_ENGINE, show_default=False)


def _sampling(name: str, help_text: str) -> Any:
    return typer.Option(name, help=help_text, rich_help_panel=_SAMPLING, show_default=False)


def _options(
    *,
    model: Annotated[str | None, _engine("--model", "A directory or a hub id; without it the embedded model.")] = None,
    device: Annotated[str | None, _engine("--device", "auto, cpu or cuda.")] = None,
    dtype: Annotated[
        str | None, _engine("--dtype", "auto (float32 on a CPU, the file's on a GPU), float32, bfloat16 or float16.")
    ] = None,
    attention_backend: Annotated[
        str | None, _engine("--attention-backend", "auto, torch, triton or flash-attn.")
    ] = None,
    runner: Annotated[
        str | None, _engine("--runner", "persistent (rows are condensed) or state-table (rows stay).")
    ] = None,
    block_size: Annotated[int | None, _engine("--block-size", "Tokens per KV block; default 16.")] = None,
    num_blocks: Annotated[
        int | None, _engine("--num-blocks", "Size of the block pool, null block included; default: from memory.")
    ] = None,
    kv_cache_memory: Annotated[int | None, _engine("--kv-cache-memory", "Bytes for the KV cache.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, _engine("--gpu-memory-utilization", "Share of the GPU's memory to use; default 0.9.")
    ] = None,
    max_model_len: Annotated[
        int | None, _engine("--max-model-len", "Most tokens of prompt and output; default: the model's limit.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, _engine("--max-num-seqs", "Most requests running at once; default 256.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, _engine("--max-num-batched-tokens", "Token budget of a step; default 2048.")
    ] = None,
    long_prefill_token_threshold: Annotated[
        int | None, _engine("--long-prefill-token-threshold", "Most tokens one request gets in a step; default 0, off.")
    ] = None,
    policy: Annotated[str | None, _engine("--policy", "fcfs, priority, or module:Class of your own.")] = None,
    no_prefix_caching: Annotated[bool, _engine("--no-prefix-caching", "Never reuse blocks of other requests.")] = False,
    no_chunked_prefill: Annotated[bool, _engine("--no-chunked-prefill", "Schedule a prompt whole or not.")] = False,
    max_tokens: Annotated[int | None, _sampling("--max-tokens", "Most output tokens; default 32.")] = None,
    min_tokens: Annotated[int | None, _sampling("--min-tokens", "No end before so many output tokens.")] = None,
    temperature: Annotated[float | None, _sampling("--temperature", "0, the default, is greedy.")] = None,
    top_p: Annotated[float | None, _sampling("--top-p", "Keep the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int | None, _sampling("--top-k", "Keep so many of the likeliest tokens.")] = None,
    min_p: Annotated[float | None, _sampling("--min-p", "Keep tokens of this share of the best's probability.")] = None,
    seed: Annotated[int | None, _sampling("--seed", "Makes random draws repeatable.")] = None,
    stop: Annotated[list[str] | None, _sampling("--stop", "A string that ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, _sampling("--ignore-eos", "Go on after end-of-text.")] = False,
    n: Annotated[int | None, _sampling("--n", "Continuations per prompt.")] = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What was given, as fields of EngineConfig and of SamplingParams."""
    engine = {
        "model": model, "device": device, "dtype": dtype, "attention_backend": attention_backend, "runner": runner,
        "block_size": block_size, "num_blocks": num_blocks, "kv_cache_memory": kv_cache_memory,
        "gpu_memory_utilization": gpu_memory_utilization, "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
        "long_prefill_token_threshold": long_prefill_token_threshold, "policy": policy,
        "enable_prefix_caching": False if no_prefix_caching else None,
        "enable_chunked_prefill": False if no_chunked_prefill else None,
        "seed": seed,
    }  # fmt: skip
    sampling = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "min_p": min_p, "seed": seed, "stop": tuple(stop) if stop else None,
        "ignore_eos": True if ignore_eos else None, "n": n,
    }  # fmt: skip
    return (
        {name: value for name, value in engine.items() if value is not None},
        {name: value for name, value in sampling.items() if value is not None},
    )
