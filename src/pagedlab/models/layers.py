"""The pieces that Qwen3 is made of (vllm/model_executor/layers)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagedlab.models.products import Formulation, Product, fastest_formulation, linear, packed


def empty_weight(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Memory that the loader fills; inference needs no gradients."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, the mean taken in float32."""

    def __init__(self, shape: tuple[int, ...], eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_weight(*shape, dtype=dtype, device=device)  # [size], or several of them
        self.eps = eps
        self.eps_tensor = torch.tensor(eps, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] → the same"""
        return self.weight * self.normalized(x)

    def normalized(self, x: Tensor) -> Tensor:
        """Without the weight."""
        if x.device.type != "cpu":
            return F.rms_norm(x, x.shape[-1:], None, self.eps)  # one kernel, which computes in float32
        wide = x.float()  # torch fuses nothing here, and this composition is the shortest
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        wide = wide * torch.addcmul(self.eps_tensor, length, length, value=1 / x.shape[-1]).rsqrt_()
        return wide.to(x.dtype)


class HeadRMSNorm(RMSNorm):
    """RMSNorm of every head in one pass, with one weight for all query heads and one for all key heads."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, eps: float, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__((2, head_size), eps, dtype, device)  # q_norm, k_norm
        self.kind = torch.tensor([0] * num_heads + [1] * num_kv_heads, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[T, num_heads + num_kv_heads, head_size] → the same"""
        return self.weight.index_select(0, self.kind) * self.normalized(x)


class MergedLinear(nn.Module):
    """y = x Wᵀ (+ b), where W may be several checkpoint tensors stacked: one product instead of three.

    With parts {"q_proj": 4, "k_proj": 2, "v_proj": 2}, rows 4 and 5 of ``weight`` are k_proj's.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        super().__init__()
        self.parts = parts
        self.weight = empty_weight(sum(parts.values()), in_features, dtype=dtype, device=device)  # [out, in]
        self.bias = empty_weight(sum(parts.values()), dtype=dtype, device=device) if bias else None  # [out]
        self.formulation: Formulation = linear       # this and the next are written again only by choose_product
        self.product: Product = linear(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]"""
        return self.product(x, self.bias)

    def choose_product(self) -> None:
        """Once the weight is loaded: multiply as is fastest here, and let go of a weight that was packed."""
        self.formulation = fastest_formulation(self.weight)
        self.product = self.formulation(self.weight)
        if self.formulation is packed:
            self.weight = empty_weight(0, self.weight.shape[1], dtype=self.weight.dtype, device=self.weight.device)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name → the rows of ours that it fills."""
        sizes = list(self.parts.values())
        names = [f"{prefix}.{part}" if part else prefix for part in self.parts]
        targets = {f"{name}.weight": rows for name, rows in zip(names, self.weight.split(sizes), strict=True)}
        if self.bias is not None:
            targets |= {f"{name}.bias": rows for name, rows in zip(names, self.bias.split(sizes), strict=True)}
        return targets


class RotaryEmbedding(nn.Module):
    """Turns pairs (x[i], x[i + head_size/2]) by position · theta^(-2i/head_size); no trained weights.

    Angles come from the positions of a step, as in transformers. vLLM looks them up in a table of
    max_position_embeddings rows, which a config may promise by the million.
    """

    def __init__(self, head_size: int, theta: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype = dtype
        inv_freq = 1.0 / theta ** (torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size)
        self.frequencies = torch.cat((-inv_freq, inv_freq))  # [head_size] float32

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Once per step, used by every layer: two of [T, 1, head_size], the first half of sin negated.

        Cosine is even and sine is odd, so negative frequencies negate that half and nothing else.
        """
        angles = positions[:, None, None] * self.frequencies
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to [T, heads, head_size]: [a, b] becomes [a · cos - b · sin, b · cos + a · sin].

    With head_size 2, x = [1, 0] and an angle of 90°, cos is [0, 0] and sin [-1, 1], and the result is [0, 1].
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # [b, a]
    return torch.addcmul(x * cos, swapped, sin)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), gate and up in one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, dtype, device)
        self.down_proj = MergedLinear(intermediate_size, {"down_proj": hidden_size}, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        return self.gate_up_proj.checkpoint_tensors(prefix) | self.down_proj.checkpoint_tensors(prefix)
