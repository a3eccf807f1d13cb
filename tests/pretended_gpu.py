"""A GPU that is not there: tensors that say they lie on cuda:0, hold memory of the CPU, and refuse to be mixed with it.

What a GPU would refuse is refused here: operands on two devices, a kernel that is given host memory, and reads or
host copies while a graph is captured. Kernels run interpreted; a graph's replay runs its pass again.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from pagedlab.kernels import block_tables, paged_attention, reshape_and_cache, slot_mapping
from pagedlab.kernels.jit import kernel
from pagedlab.worker import cuda_graphs, worker

GPU, MIB = torch.device("cuda:0"), 2**20
COPIES = {torch.Tensor.copy_, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
READS = {torch.Tensor.tolist, torch.Tensor.__int__, torch.Tensor.__bool__, torch.Tensor.nonzero,
         torch.ops.aten._local_scalar_dense.default}  # fmt: skip
CUDA = {  # what torch.cuda is asked for, and what it answers
    "is_available": True, "_lazy_init": None, "empty_cache": None, "synchronize": None, "reset_peak_memory_stats": None,
    "get_device_properties": SimpleNamespace(multi_processor_count=132), "graph_pool_handle": (0, 1),
    "memory_allocated": 2 * MIB, "memory_reserved": 2 * MIB, "max_memory_allocated": 3 * MIB,
    "mem_get_info": (60 * MIB, 64 * MIB),
}  # fmt: skip


class OnGpu(torch.Tensor):
    """Wraps ``memory``, a tensor on the CPU. Operators come to ``perform``, as do the methods listed below."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, memory):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype,
            device=GPU,
        )  # fmt: skip
        tensor.memory = memory
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return perform(function, args, kwargs or {})

    def __iter__(self):
        return iter(self.unbind(0))


def _method(name):
    return lambda self, *args, **kwargs: perform(getattr(torch.Tensor, name), (self, *args), kwargs)


for _name in ("__bool__", "__getitem__", "__int__", "__invert__", "__setitem__", "contiguous", "copy_", "data_ptr",
              "nonzero", "tolist"):  # torch asks a real device before it dispatches these
    setattr(OnGpu, _name, _method(_name))


class OnHost(torch.Generator):
    """Whatever device it is asked for."""

    def __new__(cls, device=None):
        return super().__new__(cls, "cpu")


class PretendedGpu(TorchDispatchMode):
    """Active, it takes factories for the GPU too. ``num_captures`` counts graphs."""

    is_capturing = False

    def __init__(self, monkeypatch):
        super().__init__()
        self.num_captures = 0
        tensor = torch.tensor
        for name, answer in CUDA.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **named: tensor(*args, **named).to(device))
        monkeypatch.setattr(torch, "Generator", OnHost)
        monkeypatch.setenv("CC", "cc")
        monkeypatch.setattr(torch.inference_mode, "__enter__", lambda self: None)  # it forbids wrappers
        monkeypatch.setattr(torch.inference_mode, "__exit__", lambda self, *_: None)
        monkeypatch.setattr(worker, "resolve_device", lambda name: GPU)
        monkeypatch.setattr(cuda_graphs, "capture_graph", self.capture)
        for module in (block_tables, paged_attention, reshape_and_cache, slot_mapping):
            monkeypatch.setattr(module, "kernel", lambda source, how: Launchable(source))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return perform(function, args, kwargs or {})

    def capture(self, run, pool=None):
        PretendedGpu.is_capturing = True
        try:
            run()
        finally:
            PretendedGpu.is_capturing = False
        self.num_captures += 1
        return run


class Launchable:
    def __init__(self, source):
        self.source = source

    def __getitem__(self, grid):
        def launch(*args, **meta):
            host = [x for x in args if isinstance(x, torch.Tensor) and not isinstance(x, OnGpu)]
            assert not host, f"{self.source.__name__} is given host memory"
            if "DOT_IN_FLOAT32" in meta:
                meta["DOT_IN_FLOAT32"] = True
            with _disable_current_modes():
                kernel(self.source, "interpreted")[grid](*map(_memory, args), **meta)

        return launch


def perform(function, args, kwargs):
    """Call on the memory, once it is clear that a GPU would; results lie where the operands do."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    on_gpu = [x for x in tensors if isinstance(x, OnGpu)]
    on_host = [x for x in tensors if not isinstance(x, OnGpu) and x.dim()]  # a number may come from anywhere
    if on_gpu and on_host and function not in COPIES:
        raise RuntimeError(f"{function}: operands on two devices, {[list(x.shape) for x in on_host]} on the host")
    device = kwargs.get("device")
    to_gpu = bool(on_gpu) if device is None else torch.device(device) == GPU
    if function in COPIES and device is None:
        to_gpu = isinstance(args[0], OnGpu)
    is_read = function in READS or (function in COPIES and not to_gpu)
    is_mask = function is torch.Tensor.__getitem__ and any(x.dtype == torch.bool for x in on_gpu[1:])
    if PretendedGpu.is_capturing and ((on_gpu and (is_read or is_mask)) or (to_gpu and on_host)):
        raise RuntimeError(f"{function}: operation not permitted when stream is capturing")
    args, kwargs = tree_map(_memory, (args, kwargs))
    wrappers = {id(x.memory): x for x in on_gpu}
    made = function(*args, **kwargs)
    if not to_gpu:
        return made
    return tree_map(lambda x: _wrapped(x, wrappers), made)


def _memory(x):
    return x.memory if isinstance(x, OnGpu) else torch.device("cpu") if isinstance(x, torch.device) else x


def _wrapped(x, wrappers):
    """What was changed in place keeps its wrapper."""
    if not isinstance(x, torch.Tensor):
        return x
    return wrappers[id(x)] if id(x) in wrappers else OnGpu(x)
