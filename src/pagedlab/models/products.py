"""How a CPU multiplies by a weight: measured once per shape, as no formulation is fastest everywhere.

With two cores and float32, 16 rows and a 4096 × 1024 weight, ``x @ W.T`` took 2.4 ms, ``(W @ x.T).T``
2.7 ms and oneDNN on a packed weight 1.2 ms; on another machine the second was the fastest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[[Tensor, Tensor | None], Tensor]  # ([T, in], bias [out] or None) → [T, out]
Formulation = Callable[[Tensor], Product]            # weight [out, in] → its product

SMALLEST_MEASURED = 2**20  # elements; below it all are quick, and the plain form keeps runs alike to the bit
LARGEST_MEASURED = 2**22   # elements; more than caches hold, so a slice speaks for a larger weight
ROWS = (1, 4, 16)          # a lone decode, a few, a batch


def linear(weight: Tensor) -> Product:
    return lambda x, bias: F.linear(x, weight, bias)


def transposed(weight: Tensor) -> Product:
    def product(x: Tensor, bias: Tensor | None) -> Tensor:
        y = (weight @ x.T).T.contiguous()
        return y if bias is None else y + bias

    return product


def packed(weight: Tensor) -> Product:
    """oneDNN's own layout, a copy: the weight itself is no longer needed."""
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS[-1])
    return lambda x, bias: torch.ops.mkldnn._linear_pointwise(x, layout, bias, "none", [], "")


def fastest_formulation(weight: Tensor) -> Formulation:
    """The plain one on a GPU and for small weights, else what wins a measurement of some milliseconds."""
    if weight.device.type != "cpu" or weight.numel() < SMALLEST_MEASURED:
        return linear
    out_features, in_features = weight.shape
    return _measured(min(out_features, LARGEST_MEASURED // in_features), in_features, weight.dtype)


def formulations(in_features: int, dtype: torch.dtype) -> list[Formulation]:
    """Those that this build of torch has and this processor can run in ``dtype``."""
    able: list[Formulation] = []
    weight, x = torch.ones(16, in_features, dtype=dtype), torch.ones(1, in_features, dtype=dtype)
    for formulation in (linear, transposed, packed):
        try:
            formulation(weight)(x, None)
        except (RuntimeError, AttributeError):
            continue
        able.append(formulation)
    return able


@cache
def _measured(out_features: int, in_features: int, dtype: torch.dtype) -> Formulation:
    """The formulation with the least time over ROWS, each the best of three runs."""
    weight = torch.ones(out_features, in_features, dtype=dtype)

    def seconds(product: Product) -> float:
        total = 0.0
        for rows in ROWS:
            x, times = torch.ones(rows, in_features, dtype=dtype), []
            for _ in range(3):
                start = time.perf_counter()
                product(x, None)
                times.append(time.perf_counter() - start)
            total += min(times)
        return total

    return min(formulations(in_features, dtype), key=lambda formulation: seconds(formulation(weight)))
