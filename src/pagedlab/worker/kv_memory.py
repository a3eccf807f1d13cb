"""Memory of the KV cache: how much there may be, and the buffers themselves.

The one place that allocates it (vllm/v1/worker/gpu_worker.py, determine_available_memory;
gpu_model_runner.py, initialize_kv_cache_tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from pagedlab.attention.layer import Attention
from pagedlab.config import EngineConfig
from pagedlab.kv.specs import AttentionSpec, KVCacheConfig
from pagedlab.memory import free_ram_bytes
from pagedlab.trace.events import KvAllocated, Scalar
from pagedlab.trace.tracer import trace

SHARE_OF_FREE_RAM = 0.25
CACHE_LINE = 64  # bytes; vectors that straddle two lines are read more slowly

Available = tuple[int, str, dict[str, Scalar]]  # bytes, how it was found, the terms of the arithmetic


def share_of_free_ram(config: EngineConfig, specs: Mapping[str, AttentionSpec], max_model_len: int) -> Available:
    """On a CPU: a quarter of the free memory, but no more than full seats could ever fill.

    256 seats of 2,048 tokens at block size 16 and 1 MiB per block of all layers together: 32,768
    blocks and the null block are 32 GiB and 1 MiB, so 40 GiB of free memory give 10 GiB.
    """
    free = free_ram_bytes()
    most, seats = _full_seats(config, specs, max_model_len)
    terms: dict[str, Scalar] = {"free_ram": free, "share": SHARE_OF_FREE_RAM, **seats}
    return min(int(free * SHARE_OF_FREE_RAM), most), "share_of_free_ram", terms


def profile_gpu(
    config: EngineConfig, specs: Mapping[str, AttentionSpec], max_model_len: int, device: torch.device,
    run_largest_step: Callable[[], None],
) -> Available:
    """On a GPU: what is left of the share the engine may use, after weights and the largest step.

    A GPU of 80 GB, utilization 0.9, 1.2 GB used outside of torch, 2 GB of weights and 0.8 GB at the peak
    of the largest step: 72 - 1.2 - 2 - 0.8 = 68 GB for the cache. Of the 1.2 GB vLLM 0.14.1 subtracts only
    what its own process uses, not what other programs do; in return it does not start where less than its
    whole share is free. It also takes all 68 GB where full seats could never fill them, which we leave: a
    small model would get millions of blocks, and a snapshot names each.
    """
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    activations = torch.cuda.max_memory_allocated(device) - weights
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)  # after the step, which loads kernels
    others = total - free - torch.cuda.memory_reserved(device)
    available = int(total * config.gpu_memory_utilization) - others - weights - activations
    most, seats = _full_seats(config, specs, max_model_len)
    terms: dict[str, Scalar] = {
        "total": total,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "used_by_others": others,
        "weights": weights,
        "largest_step": activations,
        **seats,
    }
    return min(max(available, 0), most), "profiled", terms


def _full_seats(
    config: EngineConfig, specs: Mapping[str, AttentionSpec], max_model_len: int
) -> tuple[int, dict[str, Scalar]]:
    """Bytes that full seats and the null block use; the same as a term, behind the numbers it comes from."""
    block_bytes = sum(spec.page_size_bytes for spec in specs.values())  # of all layers
    most = (config.max_num_seqs * -(-max_model_len // config.block_size) + 1) * block_bytes
    terms: dict[str, Scalar] = {"max_num_seqs": config.max_num_seqs, "max_model_len": max_model_len}
    return most, terms | {"most_that_full_seats_use": most}


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """[size] int8. On a CPU the system zeroes each page at its first use, so a large pool starts at once."""
    if device.type == "cpu":
        memory = torch.from_numpy(np.zeros(size + CACHE_LINE, np.int8))
        return memory[-memory.data_ptr() % CACHE_LINE :][:size]
    return torch.zeros(size, dtype=torch.int8, device=device)


def allocate_kv_cache(config: KVCacheConfig, layers: Mapping[str, Attention], device: torch.device) -> None:
    """Make the buffers and give every layer its view.

    Layers of different groups may view one buffer: a block id belongs to one group at a time, and
    block b takes the same bytes in every view, as all pages are equally large.
    """
    specs = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
    shapes = []
    for tensor in config.kv_cache_tensors:
        buffer = _zeros(tensor.size, device)
        for name in tensor.shared_by:
            spec = specs[name]
            memory = buffer.view(getattr(torch, spec.dtype))
            layers[name].kv_cache = layers[name].impl.view_kv_cache(memory, config.num_blocks, spec)
        shapes.append(list(layers[name].kv_cache.shape))
    if trace.on:
        trace.emit(
            KvAllocated(
                shapes=shapes,
                bytes=[tensor.size for tensor in config.kv_cache_tensors],
                shared_by=[list(tensor.shared_by) for tensor in config.kv_cache_tensors],
                dtype=specs[config.kv_cache_tensors[0].shared_by[0]].dtype,
                device=str(device),
            )
        )
