"""Every event the engine can emit: the one definition of the trace.

The terminal tracer, the viewer, the notebooks and the figures read nothing else. A record is one
JSON object per line; the fields of :class:`Event` are its envelope. Lists named in the plural and
of equal length in one event are parallel. Block id 0 is the null block.

Each class says from which recording level on it is written (``level``) and which of its fields
differ from run to run (``volatile``); the canonical form leaves those out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

if TYPE_CHECKING:
    from pagedlab.request import Request
    from pagedlab.sched.output import SchedulerOutput

LEVELS = ("steps", "decisions", "blocks", "tensors", "kernels")  # each contains the former
Level = Literal["steps", "decisions", "blocks", "tensors", "kernels"]
FORMAT = "pagedlab-trace"
VERSION = (1, 0)  # a reader refuses another major version, and ignores what it does not know

Scalar = str | int | float | bool | None
Groups = list[list[int]]  # one list of block ids per KV-cache group
QueueName = Literal["running", "waiting"]
Outcome = Literal["scheduled", "refused", "skipped", "preempted"]
WhyFreed = Literal["finished", "aborted", "preempted", "out_of_window"]


class Event(msgspec.Struct, kw_only=True, gc=False, tag_field="kind"):
    """The envelope; written only by the Tracer, when the event is emitted."""

    level: ClassVar[Level] = "steps"
    volatile: ClassVar[tuple[str, ...]] = ()

    seq: int = -1          # strictly increasing per process, no gap
    engine: int = -1       # several engines may live in one process
    step: int = -1         # the last step whose schedule() began, -1 before the first
    t_ns: int = 0          # monotonic clock
    proc: str = "engine"   # "engine" or "worker:<rank>"

    @property
    def kind(self) -> str:
        """The snake_case name it has in the file."""
        return str(self.__struct_config__.tag)


# ------------------------------------------------------------------ the file and the whole engine


class TraceHeader(Event, kw_only=True, tag="trace_header"):
    """First record of a file, once."""

    volatile = ("pagedlab", "source", "clock", "model", "config")

    format: str = FORMAT
    version: tuple[int, int] = VERSION
    pagedlab: str
    source: dict[str, str]                 # engine, version
    model: dict[str, Scalar | list[Scalar]]   # name, layers, heads, …; empty when no model runs
    config: dict[str, Scalar]              # the EngineConfig, resolved
    tokenizer: dict[str, Scalar]
    record: Level
    layers: str | list[int] = "all"        # layers whose kernels are traced
    clock: dict[str, int]                  # wall_ns and t_ns of the same moment
    ends_with: str | None = None           # kind of the last record of a whole file


class RequestState(msgspec.Struct, kw_only=True, gc=False):
    """One unfinished request inside a snapshot."""

    request_id: str
    status: str
    token_ids: list[int]                   # prompt, then output
    token_texts: list[str] | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    priority: int
    arrival_time: float
    queue_key: list[Scalar]                # place in the waiting queue, smallest first
    block_ids: Groups                      # block table per group; out-of-window blocks are 0


class RowState(msgspec.Struct, kw_only=True, gc=False):
    """One row of the worker's tables inside a snapshot."""

    row: int
    request_id: str
    block_ids: Groups


class EngineSnapshot(Event, kw_only=True, tag="engine_snapshot"):
    """The whole state: where a fold starts, and where a reader may jump to."""

    block_sizes: list[int]                 # per group
    num_blocks: int                        # null block included
    waiting: list[str]                     # in serving order
    running: list[str]
    requests: list[RequestState]
    free_queue: list[int]                  # front first
    ref_counts: dict[int, int]             # only where > 0, null block left out
    cached_blocks: dict[int, str]          # block id -> short hash
    rows: list[RowState]
    sliding_windows: list[int | None] = []  # per group, in tokens; None is full attention


class TraceFinished(Event, kw_only=True, tag="trace_finished"):
    """Last record of a file that was not cut off."""

    num_records: int                       # this one included


class TraceGap(Event, kw_only=True, tag="trace_gap"):
    """Records were lost here."""

    num_lost: int
    why: str


# ------------------------------------------------------------------ KV-cache initialization


class KvSpec(Event, kw_only=True, tag="kv_spec"):
    """What the cache of one layer needs."""

    layer: str
    kind_of_attention: str                 # full or sliding_window
    block_size: int                        # tokens per block
    num_kv_heads: int
    head_dim: int
    dtype: str
    sliding_window: int | None
    page_bytes: int                        # one block of this layer: 2 · block_size · heads · dim · bytes


class KvMemory(Event, kw_only=True, tag="kv_memory"):
    """How many bytes the cache may take, and how that was found."""

    volatile = ("available_bytes", "terms")

    available_bytes: int
    how: str                               # stated, share_of_free_ram, profiled, num_blocks_given
    terms: dict[str, Scalar]


class KvGroup(msgspec.Struct, kw_only=True, gc=False):
    kind_of_attention: str
    block_size: int
    sliding_window: int | None
    page_bytes: int
    layers: list[str]


class KvTensor(msgspec.Struct, kw_only=True, gc=False):
    size: int                              # bytes
    shared_by: list[str]                   # layers that view this buffer


class KvConfig(Event, kw_only=True, tag="kv_config"):
    """Groups, blocks and buffers, with the terms of the arithmetic."""

    volatile = ("available_bytes",)

    num_blocks: int                        # null block included
    groups: list[KvGroup]
    tensors: list[KvTensor]
    bytes_per_block: int                   # over all buffers
    available_bytes: int
    max_model_len: int


class KvAllocated(Event, kw_only=True, tag="kv_allocated"):
    """The memory exists; parallel lists, one entry per buffer."""

    shapes: list[list[int]]                # as a layer views it
    bytes: list[int]
    shared_by: list[list[str]]
    dtype: str
    device: str


# ------------------------------------------------------------------ at the door


class RequestAdded(Event, kw_only=True, tag="request_added"):
    """Entered the waiting queue."""

    volatile = ("arrival_time", "queue_key")

    request_id: str
    prompt_token_ids: list[int]
    prompt_token_texts: list[str] | None = None  # for people; None where there is no tokenizer
    prompt: str | None = None
    sampling: dict[str, Scalar | list[Scalar]]
    priority: int
    arrival_time: float
    cache_salt: str | None = None
    queue_key: list[Scalar]
    num_full_blocks: int                   # blocks its known tokens fill, at the hashed block size

    @classmethod
    def from_request(cls, request: Request, queue_key: tuple[Scalar, ...]) -> RequestAdded:
        params = request.sampling_params
        return cls(
            request_id=request.request_id, prompt_token_ids=request.prompt_token_ids,
            prompt_token_texts=request.prompt_token_texts, prompt=request.prompt,
            sampling={
                "max_tokens": request.max_tokens, "min_tokens": params.min_tokens, "temperature": params.temperature,
                "top_p": params.top_p, "top_k": params.top_k, "min_p": params.min_p, "seed": params.seed,
                "stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": params.ignore_eos, "eos_token_id": request.eos_token_id,
                "prompt_logprobs": params.prompt_logprobs,
            },
            priority=request.priority, arrival_time=request.arrival_time, cache_salt=request.cache_salt,
            queue_key=list(queue_key), num_full_blocks=len(request.block_hashes),
        )


class RequestAborted(Event, kw_only=True, tag="request_aborted"):
    """Cancelled: it has left its queue; its blocks and its end follow as events of their own."""

    request_id: str
    queue: QueueName


class RequestRefused(Event, kw_only=True, tag="request_refused"):
    """Never entered; the numbers say why."""

    request_id: str
    reason: str                            # prompt_too_long, never_fits, id_in_use, empty_prompt, …
    message: str
    numbers: dict[str, Scalar]


class PrefixCacheReset(Event, kw_only=True, tag="prefix_cache_reset"):
    """Refused while any block is in use."""

    done: bool
    num_used_blocks: int


# ------------------------------------------------------------------ schedule()


class StepStarted(Event, kw_only=True, tag="step_started"):
    """What the step starts from."""

    num_waiting: int
    num_running: int
    token_budget: int
    num_free_blocks: int


class PrefixMatched(Event, kw_only=True, tag="prefix_matched"):
    """What the prefix cache gave and why it stopped there."""

    level = "decisions"

    request_id: str
    num_tokens: int                        # known tokens of the request
    num_computed_tokens: int               # length of the hit
    block_ids: Groups                      # hit blocks per group; 0 before a window
    stopped_at_block: int                  # logical block, in units of block_size
    why: str                               # see PREFIX_STOPS
    block_size: int
    hash: str | None = None                # short hash that was looked for and not found
    key_differs: str | None = None         # tokens, parent, cache_salt: the part no cached block shares
    similar_block_id: int | None = None    # the cached block that shares the rest of the key
    evicted_at_step: int | None = None
    evicted_for: str | None = None
    group: int | None = None               # the group that cut the hit


PREFIX_STOPS = {
    "caching_off": "prefix caching is switched off",
    "prompt_logprobs": "the request wants prompt logprobs, which a hit cannot give",
    "partial_block": "what is left does not fill a block, and only full blocks are reusable",
    "last_token_must_be_computed": "the last token must be computed to get logits, so its block is not taken",
    "never_cached": "no block with this key was ever cached",
    "evicted": "a block with this key was cached and has been evicted since",
    "reset": "a block with this key was cached before the prefix cache was reset",
    "miss": "no block with this key is cached; what was cached before the trace began is unknown",
    "window_group": "a sliding-window group has no unbroken run of cached blocks that ends there",
}


class SlotsAllocated(Event, kw_only=True, tag="slots_allocated"):
    """allocate_slots gave what was asked; lists are per group."""

    level = "decisions"

    request_id: str
    num_new_tokens: int
    num_tokens: int                        # tokens that have a slot afterwards
    needed_from_free_hits: list[int]       # hit blocks that leave the free queue
    needed_new: list[int]
    hit_block_ids: Groups                  # put in front of an empty table
    new_block_ids: Groups                  # appended to the table
    num_free_before: int
    num_free_after: int


class SlotsRefused(Event, kw_only=True, tag="slots_refused"):
    """allocate_slots needs more blocks than are free; nothing was changed."""

    level = "decisions"

    request_id: str
    num_new_tokens: int
    needed_from_free_hits: list[int]
    needed_new: list[int]
    num_needed: int
    num_free: int


class RequestConsidered(Event, kw_only=True, tag="request_considered"):
    """The scheduler looked at this request."""

    level = "decisions"

    request_id: str
    queue: QueueName
    num_computed_tokens: int               # before this step; for an admitted one its hit
    num_tokens_wanted: int
    num_tokens_granted: int
    budget_before: int
    budget_after: int
    outcome: Outcome
    reason: str                            # see CONSIDERED_REASONS
    num_needed_blocks: int | None = None   # numbers of not_enough_free_blocks
    num_free_blocks: int | None = None
    limit: int | None = None               # the limit that cut the grant


CONSIDERED_REASONS = {
    "all_tokens": "every token it lacked was granted",
    "token_budget": "cut to what was left of the token budget",
    "long_prefill_threshold": "cut to long_prefill_token_threshold",
    "max_model_len": "cut at max_model_len",
    "not_enough_free_blocks": "it needs more blocks than are free",
    "chunked_prefill_off": "what it wants in one piece is more than is left of the budget, and chunked prefill is off",
    "self_preemption": "it needed a block and was itself the victim",
    "no_tokens_left": "max_model_len leaves it nothing to compute (the scheduler of vLLM 0.14.1 lets it wait for ever)",
}


class QueueNotReached(Event, kw_only=True, tag="queue_not_reached"):
    """A scan ended before the rest of a queue."""

    level = "decisions"

    queue: QueueName
    count: int                             # requests that were not looked at
    first_request_id: str
    reason: str                            # see NOT_REACHED_REASONS
    head_request_id: str | None = None     # numbers of head_blocked
    num_needed_blocks: int | None = None
    num_free_blocks: int | None = None
    limit: int | None = None


NOT_REACHED_REASONS = {
    "token_budget_exhausted": "the token budget of the step was used up",
    "max_num_seqs_reached": "all seats are taken",
    "head_blocked": "the head of the queue could not be scheduled, and nobody overtakes it",
    "preemption_this_step": "a step that preempts admits no one",
    "self_preemption": "a running request preempted itself, which ends the scan",
}


class RequestPreempted(Event, kw_only=True, tag="request_preempted"):
    """Lost all its blocks and waits again."""

    level = "decisions"
    volatile = ("queue_key",)              # may hold an arrival time

    request_id: str
    on_behalf_of: str
    rule: str                              # how the policy chose the victim
    num_tokens_lost: int                   # computed tokens that must be computed again (or hit)
    num_tokens_taken_back: int             # granted earlier in this same step, 0 if none
    budget_after: int
    block_ids: Groups                      # its tables, as they were
    num_free_before: int
    num_free_after: int
    queue_key: list[Scalar]


class BlockAllocated(Event, kw_only=True, tag="block_allocated"):
    """Taken from the front of the free queue."""

    level = "blocks"

    block_id: int
    ref_cnt: int                           # after
    group: int
    request_id: str
    logical_block: int                     # index in the request's table


class BlockTouched(Event, kw_only=True, tag="block_touched"):
    """A hit: one more owner; taken out of the free queue if it was free."""

    level = "blocks"

    block_id: int
    ref_cnt: int
    group: int
    request_id: str
    logical_block: int
    hash: str
    was_free: bool


class BlockCached(Event, kw_only=True, tag="block_cached"):
    """Full, and from now on to be found under its hash."""

    level = "blocks"

    block_id: int
    ref_cnt: int
    group: int
    request_id: str
    logical_block: int
    hash: str


class BlockEvicted(Event, kw_only=True, tag="block_evicted"):
    """Lost its hash because it is handed out again."""

    level = "blocks"

    block_id: int
    ref_cnt: int
    group: int                             # group whose content is lost
    request_id: str                        # for whom
    hash: str


class BlockFreed(Event, kw_only=True, tag="block_freed"):
    """One owner less; at 0 it goes to the tail of the free queue and keeps its hash."""

    level = "blocks"

    block_id: int
    ref_cnt: int
    group: int
    request_id: str
    logical_block: int
    hash: str | None
    free_queue_index: int | None           # its place in the free queue, None while others hold it
    why: WhyFreed


class NewRequest(msgspec.Struct, kw_only=True, gc=False):
    request_id: str
    num_computed_tokens: int
    block_ids: Groups


class CachedRequest(msgspec.Struct, kw_only=True, gc=False):
    request_id: str
    num_computed_tokens: int
    new_block_ids: Groups | None
    resumed: bool


class StepScheduled(Event, kw_only=True, tag="step_scheduled"):
    """The SchedulerOutput, as it leaves for the worker."""

    new: list[NewRequest]
    cached: list[CachedRequest]
    num_scheduled_tokens: dict[str, int]   # in schedule order
    total_num_scheduled_tokens: int
    preempted: list[str]
    finished_req_ids: list[str]
    num_common_prefix_blocks: list[int]

    @classmethod
    def from_output(cls, output: SchedulerOutput) -> StepScheduled:
        known = output.scheduled_cached_reqs
        return cls(
            new=[
                NewRequest(request_id=r.req_id, num_computed_tokens=r.num_computed_tokens, block_ids=list(r.block_ids))
                for r in output.scheduled_new_reqs
            ],
            cached=[
                CachedRequest(request_id=r, num_computed_tokens=computed, new_block_ids=None if b is None else list(b),
                              resumed=r in known.resumed_req_ids)
                for r, computed, b in zip(known.req_ids, known.num_computed_tokens, known.new_block_ids, strict=True)
            ],
            num_scheduled_tokens=output.num_scheduled_tokens,
            total_num_scheduled_tokens=output.total_num_scheduled_tokens,
            preempted=output.preempted_req_ids, finished_req_ids=output.finished_req_ids,
            num_common_prefix_blocks=output.num_common_prefix_blocks,
        )


# ------------------------------------------------------------------ the worker: _update_states


class RowAssigned(Event, kw_only=True, tag="row_assigned"):
    """A request came into the batch: its row, and the whole block table copied into it."""

    level = "blocks"

    request_id: str
    row: int
    block_ids: Groups
    num_computed_tokens: int


class RowFreed(Event, kw_only=True, tag="row_freed"):
    """A request left the batch, for good or until it is scheduled again."""

    level = "blocks"

    request_id: str
    row: int
    why: Literal["finished", "not_scheduled", "preempted"]


class RowMoved(Event, kw_only=True, tag="row_moved"):
    """A hole was closed by the then-last row."""

    level = "blocks"

    request_id: str
    from_row: int
    row: int


class BlocksAppended(Event, kw_only=True, tag="blocks_appended"):
    """The scheduler's news about a row's block table has been applied."""

    level = "blocks"

    request_id: str
    row: int
    block_ids: Groups
    replaced: bool = False                 # the row's table was overwritten, not appended to


class RowsStaged(Event, kw_only=True, tag="rows_staged"):
    """What the host prepared and copies to the device in this step."""

    level = "blocks"

    rows: list[int]
    num_bytes: int
    what: list[str]                        # arrays copied


# ------------------------------------------------------------------ the worker: _prepare_inputs


class BatchOrdered(Event, kw_only=True, tag="batch_ordered"):
    """Who stands where in the flat batch."""

    level = "tensors"

    request_ids: list[str]                 # batch_idx -> request
    idx_mapping: list[int] | None = None   # batch_idx -> req_state_idx (state-table runner)
    num_scheduled_tokens: list[int]
    query_start_loc: list[int]             # [num_reqs + 1]


class TablesGathered(Event, kw_only=True, tag="tables_gathered"):
    """The rows of the block table that this batch reads."""

    level = "tensors"

    group: int
    request_ids: list[str]
    block_table: list[list[int]]           # valid entries only; what lies beyond is stale
    table_stride: int                      # K, columns per row


class InputsPrepared(Event, kw_only=True, tag="inputs_prepared"):
    """The flat arrays of the forward pass; every list but the last three is per token."""

    level = "tensors"

    input_ids: list[int]                   # [num_tokens]
    positions: list[int]                   # [num_tokens]
    req_indices: list[int]                 # [num_tokens] batch row of each token
    seq_lens: list[int]                    # [num_reqs]
    logits_indices: list[int]              # [num_reqs] last token of each row
    sample_is_discarded: list[bool]        # [num_reqs] prompt or recomputation not complete
    num_padded_tokens: int = 0


class SlotsMapped(Event, kw_only=True, tag="slots_mapped"):
    """token → row → position → logical block + offset → table index → block → slot, per group.

    Derived where the kernel produces only ``slot``: logical_block, offset, table_index, block_id.
    """

    level = "tensors"
    derived: ClassVar[tuple[str, ...]] = ("logical_block", "offset", "table_index", "block_id")

    group: int
    block_size: int
    table_stride: int                      # K
    token: list[int]                       # index in the flat batch
    request_id: list[str]
    row: list[int]                         # row of the table that table_index counts in
    position: list[int]
    logical_block: list[int]
    offset: list[int]
    table_index: list[int]                 # row · K + logical_block: an index, not a block id
    block_id: list[int]
    slot: list[int]                        # block_id · block_size + offset
    how: str = "torch"                     # compiled, interpreted or torch


class MetadataBuilt(Event, kw_only=True, tag="metadata_built"):
    """What the attention backend is handed."""

    level = "tensors"

    group: int
    backend: str
    shapes: dict[str, list[int]]
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int


class KernelLaunched(Event, kw_only=True, tag="kernel_launched"):
    """A kernel, how it runs, and over which grid."""

    level = "kernels"

    name: str
    layer: str
    grid: list[int]
    meta: dict[str, Scalar]
    how: Literal["compiled", "interpreted", "torch", "graph_replay"]


class KvWritten(Event, kw_only=True, tag="kv_written"):
    """What the writer itself reports, read back from the log it filled; parallel lists."""

    level = "kernels"
    volatile = ("checksum",)               # bits differ between machines

    layer: str
    group: int
    source: Literal["triton", "triton-interpreted", "torch"]
    token: list[int]
    slot: list[int]
    block_id: list[int]
    offset: list[int]
    checksum: list[int]                    # sum of the raw bits of key and value, mod 2**32


class KvRead(Event, kw_only=True, tag="kv_read"):
    """Blocks the attention kernel read for the queries of one request."""

    level = "kernels"

    layer: str
    group: int
    source: Literal["triton", "triton-interpreted", "torch"]
    request_id: str
    block_ids: list[int]


# ------------------------------------------------------------------ sampling and update_from_output


class Candidate(msgspec.Struct, kw_only=True, gc=False):
    token_id: int
    text: str | None
    logprob: float | None                  # None stands for minus infinity


class TokensSampled(Event, kw_only=True, tag="tokens_sampled"):
    """The sampler's result for one request."""

    level = "decisions"
    volatile = ("logprob", "top")          # last digits differ between machines

    request_id: str
    row: int
    token_id: int
    text: str | None = None
    logprob: float | None = None           # of the raw logits, before temperature and truncation
    top: list[Candidate] = []
    kept: bool                             # False: the prompt was not complete, discarded


class RequestOutput(Event, kw_only=True, tag="request_output"):
    """Tokens were appended to a request."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    num_cached_tokens: int


class RequestFinished(Event, kw_only=True, tag="request_finished"):
    """The request is gone, and its blocks are given back."""

    request_id: str
    finish_reason: str
    stop_reason: str | int | None = None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    numbers: dict[str, Scalar] = {}        # for finish_reason "error": what could not fit


class TextEmitted(Event, kw_only=True, tag="text_emitted"):
    """The detokenizer released whole characters."""

    request_id: str
    text: str


class StepFinished(Event, kw_only=True, tag="step_finished"):
    """Where the time went."""

    volatile = ("stage_ns",)

    stage_ns: dict[str, int]               # nanoseconds per stage
    num_scheduled_tokens: int


EVENT_TYPES: tuple[type[Event], ...] = tuple(Event.__subclasses__())
KINDS: dict[str, type[Event]] = {str(cls.__struct_config__.tag): cls for cls in EVENT_TYPES}
