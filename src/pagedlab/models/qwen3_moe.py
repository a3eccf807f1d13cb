"""Qwen3-MoE (vllm/model_executor/models/qwen3_moe.py): Qwen3 with another MLP in some layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagedlab.models.config import ModelConfig
from pagedlab.models.layers import MergedLinear, empty_weight
from pagedlab.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM


class SparseMoE(nn.Module):
    """A router gives each token to a few experts, whose answers are added by the router's weights."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = MergedLinear(hidden, {"gate": num_experts}, dtype, device)
        self.gate_up_proj = empty_weight(num_experts, 2 * inner, hidden, dtype=dtype, device=device)
        self.down_proj = empty_weight(num_experts, hidden, inner, dtype=dtype, device=device)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] → weights [T, top_k] and experts [T, top_k] int64, most probable first."""
        probabilities = F.softmax(self.gate(x), dim=-1, dtype=torch.float32)  # [T, num_experts]
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts

    def forward(self, x: Tensor) -> Tensor:
        """Sort the (token, expert) pairs by expert, so that each expert multiplies its tokens once.

        With experts [[2, 0], [0, 1]] of two tokens the sorted pairs are 1, 2, 3, 0: expert 0 gets
        tokens 0 and 1, expert 1 token 1, expert 2 token 0.
        """
        weights, experts = self.route(x)
        pairs = experts.flatten().argsort(stable=True)  # [T · top_k] pair = token · top_k + choice, by expert
        counts = experts.flatten().bincount(minlength=len(self.gate_up_proj)).tolist()  # pairs of each expert
        by_expert = x[pairs // self.top_k].split(counts)
        answers = torch.cat([self._answer(expert, rows) for expert, rows in enumerate(by_expert) if len(rows)])
        by_pair = torch.empty_like(answers)             # [T · top_k, hidden]
        by_pair[pairs] = answers
        return (by_pair.view(-1, self.top_k, x.shape[1]) * weights[:, :, None]).sum(dim=1)

    def _answer(self, expert: int, rows: Tensor) -> Tensor:
        """One expert's MLP: [rows, hidden] → [rows, hidden]"""
        gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        targets = self.gate.checkpoint_tensors(prefix)
        for i, (gate_up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, up = gate_up.chunk(2)
            targets[f"{prefix}.experts.{i}.gate_proj.weight"] = gate
            targets[f"{prefix}.experts.{i}.up_proj.weight"] = up
            targets[f"{prefix}.experts.{i}.down_proj.weight"] = down
        return targets


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    def make_mlp(self, config: ModelConfig, layer_index: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
        if config.is_moe_layer(layer_index):
            return SparseMoE(config, dtype, device)
        return super().make_mlp(config, layer_index, dtype, device)


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    decoder_layer = Qwen3MoeDecoderLayer
