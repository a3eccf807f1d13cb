"""The rival: transformers' ``generate`` on the same checkpoint, all requests in one padded batch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from pagedlab.bench.throughput import Run, Workload
from pagedlab.errors import UserError


class PaddedGenerate:
    """Prompts are padded on the left to the longest one, and all rows go on until the longest output is done.

    Only the tokens that were asked for count, which is what padding costs.
    """

    def __init__(self, model_dir: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise UserError("--compare transformers needs transformers: pip install transformers.") from None
        self.device = device
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        self._model = model.to(device).eval()
        # Lengths and greedy choice are the workload's; what generation_config says must not interfere.
        self._model.generation_config = type(self._model.generation_config)()

    @torch.inference_mode()
    def run(self, workload: Workload) -> Run:
        """Generate once; the clock runs from lists of ids to lists of ids, as for the engine."""
        start = time.perf_counter()
        longest = max(map(len, workload.prompts))
        input_ids = torch.zeros(len(workload.prompts), longest, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(workload.prompts):
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        num_steps = max(workload.output_lens)
        output = self._model.generate(
            input_ids.to(self.device),
            attention_mask=attention_mask.to(self.device),
            do_sample=False,
            max_new_tokens=num_steps,
            min_new_tokens=num_steps,
            pad_token_id=0,
        )
        rows = [row[:n] for row, n in zip(output[:, longest:].tolist(), workload.output_lens, strict=True)]
        seconds = time.perf_counter() - start
        if sum(map(len, rows)) != workload.num_output_tokens:
            raise RuntimeError("transformers produced fewer tokens than were asked for")
        return Run(seconds, num_steps)
