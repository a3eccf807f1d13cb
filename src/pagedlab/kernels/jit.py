"""How a kernel is run: compiled for the GPU, under Triton's interpreter, or as its torch twin.

The index kernels are plain functions written in Triton's language; this module turns one into a
launchable kernel on first use, so that a file of kernels imports without triton.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from pagedlab.errors import UserError

How = Literal["compiled", "interpreted", "torch"]

CHANGES_EVERY_STEP = ["num_tokens"]  # arguments of which Triton compiles no variants, for 1 or multiples of 16


@cache
def kernel(source: Callable[..., None], how: How) -> Any:
    """The launchable form of a kernel's source: ``kernel(f, how)[grid](...)``.

    Raises:
        UserError: triton is not installed.
    """
    try:
        import triton
        import triton.language
    except ImportError:
        raise UserError(
            "triton is not installed: install pagedlab[triton], or choose the attention backend torch."
        ) from None
    source.__globals__["tl"] = triton.language  # the source's own name for it: importing takes a third of a second
    if how == "compiled":
        os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # round product and sum once; 3.10 stops doing it
        return triton.jit(source, do_not_specialize=CHANGES_EVERY_STEP)
    from triton.runtime.interpreter import InterpretedFunction

    return InterpretedFunction(source)


def has_c_compiler() -> bool:
    """Triton has none of its own, and builds the launcher of compiled kernels with it, once per machine."""
    return bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))


@dataclass(frozen=True)
class PointerTable:
    """Several [rows, K_g] int32 tables, one per KV-cache group, that one kernel launch reads.

    A kernel cannot take a list of tensors; it takes their addresses and follows the one of its
    group. The tensors must therefore stay where they are for as long as the table is used.
    """

    tables: tuple[Tensor, ...]  # G × [rows, K_g] int32
    pointers: Tensor            # [G] uint64   group -> address of its table
    strides: Tensor             # [G] int64    group -> K_g, entries from row to row

    @classmethod
    def of(cls, tables: Sequence[Tensor]) -> PointerTable:
        device = tables[0].device
        return cls(
            tables=tuple(tables),
            pointers=torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64, device=device),
            strides=torch.tensor([t.stride(0) for t in tables], dtype=torch.int64, device=device),
        )
