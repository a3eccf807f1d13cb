"""An engine's state read off the live objects one by one, without the trace."""

from __future__ import annotations

from collections import OrderedDict

from pagedlab.engine.core import EngineCore
from pagedlab.kv.hashing import short_hash
from pagedlab.trace.events import RequestState
from pagedlab.trace.state import EngineState


def walk_live(core: EngineCore) -> EngineState:
    """What a fold of its events should arrive at."""
    scheduler, manager = core.scheduler, core.scheduler.kv_cache_manager
    pool = manager.block_pool
    requests = {}
    for request_id, request in scheduler.requests.items():
        requests[request_id] = RequestState(
            request_id=request_id,
            status=request.status.value,
            token_ids=list(request.all_token_ids),
            token_texts=None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_preemptions=request.num_preemptions,
            priority=request.priority,
            arrival_time=request.arrival_time,
            queue_key=[],
            block_ids=[list(ids) for ids in manager.get_block_ids(request_id)],
        )
    return EngineState(
        engine=core.engine_id,
        step=core.step_id,
        seq=-1,
        block_sizes=[group.block_size for group in manager.groups],
        sliding_windows=[group.sliding_window for group in manager.groups],
        num_blocks=pool.num_blocks,
        requests=requests,
        waiting=[r.request_id for r in scheduler.waiting],
        running=[r.request_id for r in scheduler.running],
        free_queue=OrderedDict.fromkeys(b.block_id for b in pool.free_block_queue),
        ref_counts={b.block_id: b.ref_cnt for b in pool.blocks[1:] if b.ref_cnt},
        cached_blocks={b.block_id: short_hash(b.block_hash) for b in pool.blocks if b.block_hash is not None},
        rows={r.row: r for r in core.executor.row_states()},
    )
