"""Qwen3 (vllm/model_executor/models/qwen3.py): flat tokens in, flat hidden states out.

There is no batch dimension: T tokens of any number of requests lie side by side, and only
attention knows which request a token belongs to.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagedlab.attention.backends import AttentionBackend, AttentionLayerConfig
from pagedlab.attention.layer import Attention
from pagedlab.models.config import ModelConfig
from pagedlab.models.layers import GatedMLP, HeadRMSNorm, MergedLinear, RMSNorm, RotaryEmbedding, empty_weight, rotate
from pagedlab.models.products import linear


class Qwen3Attention(nn.Module):
    """Projections, norms of queries and keys per head, rotary embedding, paged attention."""

    def __init__(self, config: ModelConfig, layer_index: int, backend: AttentionBackend, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.head_size = config.head_dim
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        q_size, kv_size = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        bias = config.attention_bias
        self.qkv_proj = MergedLinear(config.hidden_size, parts, dtype, device, bias)
        self.o_proj = MergedLinear(q_size, {"o_proj": config.hidden_size}, dtype, device, bias)
        self.qk_norm = HeadRMSNorm(
            self.num_heads, self.num_kv_heads, self.head_size, config.rms_norm_eps, dtype, device
        )
        self.attn = Attention(
            AttentionLayerConfig(
                layer_name=f"model.layers.{layer_index}.self_attn.attn",
                layer_index=layer_index,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                scale=self.head_size**-0.5,
                sliding_window=config.sliding_window_of(layer_index),
            ),
            backend,
        )

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_size))
        qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = rotate(self.qk_norm(qk), cos, sin).split([self.num_heads, self.num_kv_heads], dim=1)
        return self.o_proj(self.attn(q, k, v).flatten(1))

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {
            **self.qkv_proj.checkpoint_tensors(prefix),
            **self.o_proj.checkpoint_tensors(prefix),
            f"{prefix}.q_norm.weight": self.qk_norm.weight[0],
            f"{prefix}.k_norm.weight": self.qk_norm.weight[1],
        }


class Qwen3DecoderLayer(nn.Module):
    """Attention and MLP, each added to the residual stream; a mixture brings another ``mlp``."""

    def __init__(self, config: ModelConfig, layer_index: int, backend: AttentionBackend, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm((config.hidden_size,), config.rms_norm_eps, dtype, device)
        self.self_attn = Qwen3Attention(config, layer_index, backend, dtype, device)
        self.post_attention_layernorm = RMSNorm((config.hidden_size,), config.rms_norm_eps, dtype, device)
        self.mlp = self.make_mlp(config, layer_index, dtype, device)

    def make_mlp(self, config: ModelConfig, layer_index: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
        return GatedMLP(config.hidden_size, config.intermediate_size, dtype, device)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, hidden_size] → [T, hidden_size]"""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}.input_layernorm.weight": self.input_layernorm.weight,
            f"{prefix}.post_attention_layernorm.weight": self.post_attention_layernorm.weight,
            **self.self_attn.checkpoint_tensors(f"{prefix}.self_attn"),
            **self.mlp.checkpoint_tensors(f"{prefix}.mlp"),  # type: ignore[operator]
        }


class Qwen3ForCausalLM(nn.Module):
    """Embedding, decoder layers, final norm, head."""

    decoder_layer = Qwen3DecoderLayer

    def __init__(self, config: ModelConfig, backend: AttentionBackend, dtype: torch.dtype,
                 device: torch.device) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = empty_weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.decoder_layers = [
            self.decoder_layer(config, i, backend, dtype, device) for i in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(self.decoder_layers)  # so that torch finds them
        self.norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, dtype, device)
        self.lm_head = MergedLinear(config.hidden_size, {"": config.vocab_size}, dtype, device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens
            self.lm_head.product = linear(self.embed_tokens)
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, dtype, device)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())  # a tied head counts once

    @property
    def attention_layers(self) -> dict[str, Attention]:
        """Layer name → layer, in order: what the KV cache is made for."""
        layers = [layer.self_attn.attn for layer in self.decoder_layers]
        return {layer.config.layer_name: layer for layer in layers}

    def forward(
        self,
        input_ids: Tensor,   # [T] int64
        positions: Tensor,   # [T] int64   place of each token in its own request
    ) -> Tensor:             # [T, hidden_size]
        hidden = F.embedding(input_ids, self.embed_tokens)
        cos, sin = self.rotary.cos_sin(positions)
        for layer in self.decoder_layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, vocab_size] float32; only for the positions that are sampled."""
        return self.lm_head(hidden).float()

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name → the part of our weights that it fills."""
        targets: dict[str, Tensor] = {"model.embed_tokens.weight": self.embed_tokens}
        targets["model.norm.weight"] = self.norm.weight
        for i, layer in enumerate(self.decoder_layers):
            targets |= layer.checkpoint_tensors(f"model.layers.{i}")
        if not self.config.tie_word_embeddings:
            targets |= self.lm_head.checkpoint_tensors("lm_head")
        return targets
