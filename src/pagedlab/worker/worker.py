"""The worker of one device: loads the model, finds memory for its cache, runs steps.

In a single process it is the engine's executor (vllm/v1/worker/gpu_worker.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from pagedlab.attention.backends import choose_attention_backend
from pagedlab.attention.forward_context import set_forward_context
from pagedlab.config import EngineConfig
from pagedlab.errors import UserError
from pagedlab.kernels.jit import How, has_c_compiler
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig
from pagedlab.models.config import ModelConfig
from pagedlab.models.loader import load_model
from pagedlab.sampling_params import SamplingParams
from pagedlab.sched.output import ModelRunnerOutput, SchedulerOutput
from pagedlab.trace.events import RowState
from pagedlab.worker.kv_memory import Available, profile_gpu, share_of_free_ram
from pagedlab.worker.persistent_batch import PersistentBatchRunner
from pagedlab.worker.requests import CachedRequestState
from pagedlab.worker.runner import GPUModelRunner
from pagedlab.worker.sampler import Sampler
from pagedlab.worker.state_table import StateTableRunner

KEPT_BYTES = 1 << 28                         # of freed memory on a CPU
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class Worker:
    """Call in this order: load_model, determine_available_memory, initialize_from_config, execute_model."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model_dir: Path,
        token_text: Callable[[int], str] | None = None,  # for people who read the trace
    ) -> None:
        self.config, self.model_config, self.model_dir = config, model_config, model_dir
        self.token_text = token_text
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, self.device, model_config)
        if self.device.type == "cpu":
            keep_freed_memory()
        runner_class = PersistentBatchRunner if config.runner == "persistent" else StateTableRunner
        self.runner: GPUModelRunner = runner_class(
            config, device=self.device, index_kernels=resolve_index_kernels(config, self.device)
        )

    def load_model(self) -> None:
        """Read the weights and choose the attention backend."""
        self.backend = choose_attention_backend(
            self.config.attention_backend, self.device, head_size=self.model_config.head_dim,
            block_sizes=[self.config.block_size], dtype=self.dtype,
        )  # fmt: skip
        model = load_model(
            self.model_dir, self.model_config, device=self.device, dtype=self.dtype, attention_backend=self.backend
        )
        sampler = Sampler(self.model_config.eos_token_ids, self.config.seed, self.device, self.token_text)
        self.runner.load_model(model, self.backend, sampler)

    def get_kv_cache_specs(self) -> dict[str, AttentionSpec]:
        """What every attention layer needs of the cache."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            name: layer.get_kv_cache_spec(self.config.block_size, dtype)
            for name, layer in self.runner.model.attention_layers.items()
        }

    def determine_available_memory(self) -> Available:
        """Bytes the cache may take, how that was found, and the terms of the arithmetic."""
        if self.config.kv_cache_memory is not None:
            return self.config.kv_cache_memory, "stated", {"kv_cache_memory": self.config.kv_cache_memory}
        specs, max_model_len = self.get_kv_cache_specs(), self.config.max_model_len
        max_model_len = max_model_len or self.model_config.max_position_embeddings
        if self.device.type == "cuda":
            return profile_gpu(self.config, specs, max_model_len, self.device, self._run_largest_step)
        return share_of_free_ram(self.config, specs, max_model_len)

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        """As many tokens and samples as a step may hold; no cache exists yet, so none is touched."""
        num_tokens = self.config.max_num_batched_tokens
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        model = self.runner.model
        with set_forward_context({}):
            hidden = model(tokens, tokens)
        logits = model.compute_logits(hidden[: self.config.max_num_seqs])
        seeded = CachedRequestState(  # with a generator of its own: the engine's draws its first number for a request
            req_id="", prompt_token_ids=[], sampling_params=SamplingParams(top_p=0.5), block_ids=(),
            num_computed_tokens=0, generator=torch.Generator(self.device),
        )  # fmt: skip
        self.runner.sampler.draw(logits, [seeded] * len(logits))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig, max_model_len: int) -> None:
        """Allocate the cache and the runner's tables."""
        self.runner.initialize_kv_cache(kv_cache_config, max_model_len)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute_model(scheduler_output)

    def row_states(self) -> list[RowState]:
        return self.runner.row_states()

    @property
    def stage_ns(self) -> dict[str, int]:
        """Host time of the latest step's parts."""
        return self.runner.stage_ns


def keep_freed_memory() -> None:
    """Have glibc keep what a layer frees for the next layer; other C libraries are left as they are.

    Else every large activation is given back and comes again as pages to be zeroed: a prefill of 1,484 tokens at
    Qwen3-0.6B's size spent 0.9 s of processor time on that, and 0.02 s when they are kept.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def resolve_device(name: str) -> torch.device:
    """ "auto" is the GPU where there is one.

    Raises:
        UserError: a GPU was asked for and torch sees none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but torch finds no GPU: use --device cpu, or a torch built for CUDA.")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device, model_config: ModelConfig) -> torch.dtype:
    """ "auto" is float32 on a CPU and the file's own on a GPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else model_config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_index_kernels(config: EngineConfig, device: torch.device) -> How:
    """Triton where there is a GPU and it can compile; its interpreter for the triton backend without a GPU."""
    if device.type == "cuda":
        return "compiled" if importlib.util.find_spec("triton") and has_c_compiler() else "torch"
    return "interpreted" if config.attention_backend == "triton" else "torch"
