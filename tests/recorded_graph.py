"""A stand-in for a CUDA graph on a CPU: it replays launches on the memory they used, and no Python around them."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from pagedlab.kernels import paged_attention, reshape_and_cache


class Borrowed:
    """A tensor that is not the graph's own: where it lies, and nothing that keeps it alive."""

    def __init__(self, tensor):
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self.dtype = tensor.dtype

    def tensor(self):
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, "a replay uses memory that was freed after the capture"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)


class RecordedGraph(TorchDispatchMode):
    """Records operators and interpreted kernels. What they allocate is the graph's own and is poisoned before a replay.

    ``RecordedGraph(monkeypatch, run)()`` is a replay; ``functools.partial(RecordedGraph, monkeypatch)`` a capture.
    """

    def __init__(self, monkeypatch, run):
        super().__init__()
        self.launches = []  # (function, arguments, results)
        self.own = {}       # address of memory that was allocated while recording -> the tensor that holds it
        with monkeypatch.context() as patched, self:
            for module in (paged_attention, reshape_and_cache):
                patched.setattr(module, "kernel", self._recorded_kernel(module.kernel))
            self.output = run()

    def __call__(self):
        for tensor in self.own.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 2**20)
        for function, arguments, results in self.launches:
            args, named = tree_map(lambda x: x.tensor() if isinstance(x, Borrowed) else x, arguments)
            for mine, result in zip(results, tree_leaves(function(*args, **named)), strict=True):
                if mine is not None and mine.data_ptr() != result.data_ptr():
                    mine.copy_(result)
        return self.output

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return self._record(function, args, kwargs or {})

    def _recorded_kernel(self, kernel):
        def launchable(source, how):
            class Kernel:
                def __getitem__(self, grid):
                    return lambda *args, **meta: record(lambda *a, **m: kernel(source, how)[grid](*a, **m), args, meta)

            return Kernel()

        record = self._record
        return launchable

    def _record(self, function, args, kwargs):
        arguments = tree_map(self._remembered, (args, kwargs))
        with _disable_current_modes():
            made = function(*args, **kwargs)
        borrowed = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        results = []
        for x in tree_leaves(made):
            is_mine = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in borrowed - self.own.keys()
            results.append(x if is_mine else None)
            if is_mine:
                self.own.setdefault(x.untyped_storage().data_ptr(), x)
        self.launches.append((function, arguments, results))
        return made

    def _remembered(self, x):
        is_foreign = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.own
        return Borrowed(x) if is_foreign else x
