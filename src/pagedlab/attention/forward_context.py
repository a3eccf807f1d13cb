"""How attention layers find this step's metadata without every module passing it on.

vLLM 0.14 keeps it in a module-level variable (vllm/forward_context.py), not in a thread-local.
It is set in one place, around the model's forward pass, and read in one, ``Attention.forward``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ForwardContext = Mapping[str, Any]  # layer name -> metadata, as the layer's own backend built it

_forward_context: ForwardContext | None = None  # written only by set_forward_context


@contextmanager
def set_forward_context(metadata_by_layer: ForwardContext) -> Iterator[None]:
    """Hold the metadata for the forward pass inside the ``with`` block.

    An empty mapping stands for a pass that measures memory: attention writes and reads nothing.
    """
    global _forward_context
    before, _forward_context = _forward_context, metadata_by_layer
    try:
        yield
    finally:
        _forward_context = before


def get_forward_context() -> ForwardContext:
    """The context of the running forward pass.

    Raises:
        AssertionError: the model was called outside ``set_forward_context``.
    """
    assert _forward_context is not None, "call the model inside `with set_forward_context(...)`"
    return _forward_context
