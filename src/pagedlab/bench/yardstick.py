"""What a decode step cannot beat: the model's matrix products alone, without attention and engine."""

from __future__ import annotations

import statistics
import time
from collections import Counter

import torch
from torch import Tensor

from pagedlab.models.layers import MergedLinear
from pagedlab.models.products import Formulation, Product, formulations
from pagedlab.models.qwen3 import Qwen3ForCausalLM

COMPARED_BYTES = 2**26  # of one shape: more than caches hold; larger weights are represented by a slice
PASSES = 5              # the median of them counts, as it does for steps

Shape = tuple[int, int]  # out, in


class BareProducts:
    """Times a dense model's own products, in its order and on its own weights.

    A weight is multiplied as was found fastest when it was loaded. Should another formulation win now,
    on copies of the same shape, the time of that shape shrinks by as much.
    """

    def __init__(self, model: Qwen3ForCausalLM, num_rows: int, dtype: torch.dtype) -> None:
        self._linears = [module for module in model.modules() if isinstance(module, MergedLinear)]
        self._x = {num_in: torch.ones(num_rows, num_in, dtype=dtype) for _, num_in in map(_shape, self._linears)}
        self._chosen = {_shape(linear): linear.formulation for linear in self._linears}
        self._copies: dict[Shape, dict[Formulation, list[Product]]] = {}
        for (num_out, num_in), count in Counter(map(_shape, self._linears)).items():
            row_bytes = num_in * dtype.itemsize
            compared_out = min(num_out, COMPARED_BYTES // row_bytes)
            copies = max(1, min(count, COMPARED_BYTES // (compared_out * row_bytes)))
            weights = [torch.ones(compared_out, num_in, dtype=dtype) for _ in range(copies)]
            self._copies[num_out, num_in] = {
                formulation: [formulation(weight) for weight in weights] for formulation in formulations(num_in, dtype)
            }

    @torch.inference_mode()
    def seconds(self) -> float:
        """One forward pass of nothing but products."""
        passes = sorted((self._one_pass() for _ in range(PASSES)), key=lambda by_shape: sum(by_shape.values()))
        return sum(seconds * self._share_of_fastest(shape) for shape, seconds in passes[PASSES // 2].items())

    def _one_pass(self) -> dict[Shape, float]:
        by_shape = dict.fromkeys(self._chosen, 0.0)
        for linear in self._linears:
            shape = _shape(linear)
            by_shape[shape] += _seconds([linear.product], self._x[shape[1]])
        return by_shape

    def _share_of_fastest(self, shape: Shape) -> float:
        """Time of the fastest formulation over that of the chosen one, at most 1."""
        times = {
            formulation: statistics.median(_seconds(products, self._x[shape[1]]) for _ in range(PASSES))
            for formulation, products in self._copies[shape].items()
        }
        return min(times.values()) / times[self._chosen[shape]]


def _shape(linear: MergedLinear) -> Shape:
    """Of the weight, which is gone once it is packed."""
    return sum(linear.parts.values()), linear.weight.shape[1]


def _seconds(products: list[Product], x: Tensor) -> float:
    start = time.perf_counter()
    for product in products:
        product(x, None)
    return time.perf_counter() - start
