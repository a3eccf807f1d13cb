"""All figures by name: each a function from recorded traces to a Drawing. No number in them is written by hand."""

from __future__ import annotations

from collections.abc import Callable

from pagedlab.figures.cache import allocate_slots, kv_cache_init
from pagedlab.figures.engine import request_path, schedule_two_queues
from pagedlab.figures.svg import Drawing
from pagedlab.figures.worker import attention_writes_and_reads, index_spaces, worker_inputs

FIGURES: dict[str, Callable[[], Drawing]] = {
    "1-request-path": request_path,
    "2-schedule": schedule_two_queues,
    "3-allocate-slots": allocate_slots,
    "4-kv-cache-init": kv_cache_init,
    "5-worker-inputs": worker_inputs,
    "6-attention": attention_writes_and_reads,
    "7-index-spaces": index_spaces,
}
