"""What a decode step cannot beat: the model's matrix products alone, without attention and engine."""

from __future__ import annotations

import time
from collections import Counter

import torch

from pagedlab.models.layers import MergedLinear
from pagedlab.models.products import Product, formulations
from pagedlab.models.qwen3 import Qwen3ForCausalLM

MEASURED_BYTES = 2**26  # of one shape: more than caches hold; larger weights are represented by a slice


class BareProducts:
    """Times every weight shape of a dense model in each formulation torch offers, and adds up the best.

    A shape that 28 layers have is measured on several copies, so that none stays in a cache.
    """

    def __init__(self, model: Qwen3ForCausalLM, num_rows: int, dtype: torch.dtype) -> None:
        linears = [module for module in model.modules() if isinstance(module, MergedLinear)]
        self._num_rows, self._dtype = num_rows, dtype
        # shape -> weights that each product stands for, products by formulation
        self._products: dict[tuple[int, int], tuple[float, list[list[Product]]]] = {}
        for shape, count in Counter((sum(m.parts.values()), m.weight.shape[1]) for m in linears).items():
            row_bytes = shape[1] * dtype.itemsize
            num_out = min(shape[0], MEASURED_BYTES // row_bytes)
            copies = max(1, min(count, MEASURED_BYTES // (num_out * row_bytes)))
            weights = [torch.ones(num_out, shape[1], dtype=dtype) for _ in range(copies)]
            stands_for = count * shape[0] / (copies * num_out)
            self._products[shape] = stands_for, [
                [form(weight) for weight in weights] for form in formulations(shape[1], dtype)
            ]

    @torch.inference_mode()
    def seconds(self) -> float:
        """One forward pass: per shape the fastest formulation, the best of three runs."""
        total = 0.0
        for (_, num_in), (stands_for, candidates) in self._products.items():
            x = torch.ones(self._num_rows, num_in, dtype=self._dtype)
            total += stands_for * min(_seconds(products, x) for products in candidates for _ in range(3))
        return total


def _seconds(products: list[Product], x: torch.Tensor) -> float:
    start = time.perf_counter()
    for product in products:
        product(x, None)
    return time.perf_counter() - start
