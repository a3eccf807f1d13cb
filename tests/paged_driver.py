"""Drives a model over a paged cache by hand, without scheduler or worker: for tests of floors below them.

Blocks are handed out in random order, the cache starts full of NaN, table entries beyond the valid
ones hold rubbish, and blocks that slid out of a window become the null block: whatever reads more
than it should shows it.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch

from pagedlab.attention.backends import choose_attention_backend
from pagedlab.attention.forward_context import set_forward_context
from pagedlab.attention.metadata import CommonAttentionMetadata
from pagedlab.models.config import ModelConfig
from pagedlab.models.loader import load_model
from pagedlab.worker.input_batch import InputBatch

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
RUBBISH = 2**30  # a block id that no cache has

torch.set_num_threads(1)  # the models are tiny: on a busy machine threads would only wait for each other


class PagedDriver:
    def __init__(self, model_dir, *, dtype=torch.float32, backend="torch", block_size=16, num_blocks=64,
                 fill=float("nan"), seed=0):
        self.config = ModelConfig.from_directory(model_dir)
        self.block_size, self.device = block_size, torch.device("cpu")
        self.backend = choose_attention_backend(
            backend, self.device, head_size=self.config.head_dim, block_sizes=[block_size], dtype=dtype
        )
        self.model = load_model(
            model_dir, self.config, device=self.device, dtype=dtype, attention_backend=self.backend
        )
        layers = self.model.attention_layers
        self.groups = {}  # spec -> layer names
        for name, layer in layers.items():
            spec = layer.get_kv_cache_spec(block_size, str(dtype).removeprefix("torch."))
            size = 2 * num_blocks * block_size * spec.num_kv_heads * spec.head_size
            layer.kv_cache = layer.impl.view_kv_cache(torch.full((size,), fill, dtype=dtype), num_blocks, spec)
            self.groups.setdefault(spec, []).append(name)
        self.builders = [self.backend.make_builder(g, spec) for g, spec in enumerate(self.groups)]
        self.free = list(range(1, num_blocks))
        random.Random(seed).shuffle(self.free)
        self.tables, self.computed = {}, {}

    def start(self, req_id, shared_blocks=None, num_computed=0):
        """A new request, perhaps with blocks and computed tokens of another (a prefix hit)."""
        self.tables[req_id] = [list(t) for t in shared_blocks] if shared_blocks else [[] for _ in self.groups]
        self.computed[req_id] = num_computed

    def input_batch(self, work: dict[str, list[int]]) -> InputBatch:
        """``work``: request → its new tokens of this step."""
        rows = list(work)
        counts = [len(work[r]) for r in rows]
        seq_lens = [self.computed[r] + n for r, n in zip(rows, counts, strict=True)]
        positions = [p for r, s in zip(rows, seq_lens, strict=True) for p in range(self.computed[r], s)]
        req_indices = [i for i, n in enumerate(counts) for _ in range(n)]
        tables, slots = [], []
        for g, spec in enumerate(self.groups):
            for r, s in zip(rows, seq_lens, strict=True):
                table = self.tables[r][g]
                while len(table) * self.block_size < s:
                    table.append(self.free.pop())
                if spec.sliding_window:
                    gone = max(0, self.computed[r] - spec.sliding_window + 1) // self.block_size
                    table[:gone] = [0] * gone
            width = max(len(self.tables[r][g]) for r in rows) + 2
            tables.append(torch.tensor(
                [self.tables[r][g] + [RUBBISH] * (width - len(self.tables[r][g])) for r in rows], dtype=torch.int32
            ))
            slots.append(torch.tensor([
                self.tables[rows[i]][g][p // self.block_size] * self.block_size + p % self.block_size
                for i, p in zip(req_indices, positions, strict=True)
            ]))
        query_start_loc = torch.tensor([0, *counts]).cumsum(0).int()
        return InputBatch(
            req_ids=rows, num_reqs=len(rows), num_tokens=sum(counts), num_scheduled_tokens=counts,
            idx_mapping=torch.arange(len(rows)), req_indices=torch.tensor(req_indices),
            input_ids=torch.tensor([t for r in rows for t in work[r]]), positions=torch.tensor(positions),
            query_start_loc=query_start_loc, seq_lens=torch.tensor(seq_lens).int(),
            logits_indices=(query_start_loc[1:] - 1).long(), block_tables=tuple(tables), slot_mappings=tuple(slots),
            sample_is_discarded=[False] * len(rows), max_query_len=max(counts), max_seq_len=max(seq_lens),
        )

    def metadata(self, batch: InputBatch):
        by_layer = {}
        for g, (names, builder) in enumerate(zip(self.groups.values(), self.builders, strict=True)):
            metadata = builder.build(CommonAttentionMetadata.from_input_batch(batch, g))
            by_layer |= dict.fromkeys(names, metadata)
        return by_layer

    @torch.inference_mode()
    def step(self, work: dict[str, list[int]], all_positions=False) -> torch.Tensor:
        """Logits after each request's last new token, [R, vocab]; or after every token, [T, vocab]."""
        batch = self.input_batch(work)
        with set_forward_context(self.metadata(batch)):
            hidden = self.model(batch.input_ids, batch.positions)
        for r, tokens in work.items():
            self.computed[r] += len(tokens)
        return self.model.compute_logits(hidden if all_positions else hidden[batch.logits_indices])

    def greedy(self, prompts: dict[str, list[int]], num_tokens: int, chunk: int = 10**9):
        """All requests side by side; prompts in chunks. → request → (ids, logits at the last prompt position)."""
        known = {r: list(p) for r, p in prompts.items()}
        first = {}
        for r in prompts:
            self.start(r)
        while True:
            work = {
                r: t[self.computed[r] :][:chunk]
                for r, t in known.items() if len(t) < len(prompts[r]) + num_tokens
            }
            if not work:
                return {r: (known[r][len(prompts[r]) :], first[r]) for r in prompts}
            for r, logits in zip(work, self.step(work), strict=True):
                if self.computed[r] == len(known[r]):
                    first.setdefault(r, logits)
                    known[r].append(int(logits.argmax()))
