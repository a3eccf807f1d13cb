"""Each figure as a function from recorded traces to a Drawing. No number here is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pagedlab.figures.record import stored
from pagedlab.figures.svg import Drawing
from pagedlab.figures.symbols import code
from pagedlab.trace.events import (
    CONSIDERED_REASONS,
    BatchOrdered,
    BlockAllocated,
    Event,
    InputsPrepared,
    KvAllocated,
    KvConfig,
    KvRead,
    KvSpec,
    KvWritten,
    MetadataBuilt,
    PrefixMatched,
    RequestAdded,
    RequestConsidered,
    SlotsAllocated,
    SlotsMapped,
    StepScheduled,
    StepStarted,
    TablesGathered,
)
from pagedlab.trace.trace import Trace

E = TypeVar("E", bound=Event)


def _only(trace: Trace, cls: type[E], step: int | None = None) -> list[E]:
    return [e for e in trace if type(e) is cls and (step is None or e.step == step)]


def request_path() -> Drawing:
    """A request's way into the engine."""
    trace = stored("two-five-three")
    added = _only(trace, RequestAdded)
    d = Drawing(
        "A request's way into the engine",
        "Text becomes token ids, ids become a Request with hashed blocks, and the request waits. Nothing has been "
        "computed and no block is taken until schedule() looks at it.",
    )
    first = max(added, key=lambda e: len(e.prompt_token_ids))
    stops = [
        ("your program", code("engine.llm:LLM.generate"), [f"prompt: {first.prompt}"]),
        ("text → ids", code("engine.input_processor:InputProcessor.process"),
         [f"{len(first.prompt_token_ids)} tokens: {', '.join(map(str, first.prompt_token_ids))}"]),
        ("the door", code("engine.core:EngineCore.add_request"),
         ["refuses what can never fit, with the numbers", code("engine.guards:check_at_the_door")]),
        ("the queue", code("sched.scheduler:Scheduler.add_request"),
         [f"{first.num_full_blocks} full blocks are hashed", "status WAITING, 0 tokens computed"]),
    ]  # fmt: skip
    for i, (head, name, lines) in enumerate(stops):
        x = 40 + i * 306
        d.card(x, 140, 270, 190, head, lines)
        d.text(x + 14, 318, name, size=12.5, fill="accent", mono=True)
        if i:
            d.arrow(x - 34, 235, x - 3, 235)
    d.text(40, 385, "waiting, in serving order", size=17, weight=650)
    for i, e in enumerate(added):
        x = 40 + i * 306
        d.box(x, 405, 270, 120, stroke=e.request_id)
        d.text(x + 14, 433, e.request_id, size=18, weight=700, fill=e.request_id)
        texts = e.prompt_token_texts or [str(t) for t in e.prompt_token_ids]
        d.text(x + 50, 433, f"{len(texts)} tokens", size=15, fill="dim")
        width = min(60.0, 242 / len(texts))
        for k, text in enumerate(texts):
            d.cell(
                x + 14 + k * width,
                448,
                width - 3,
                30,
                text.strip() or "·",
                size=min(13, (width - 8) / max(len(text), 4) / 0.62),
            )
        d.text(x + 14, 508, f"queue key {e.queue_key}", size=13, fill="dim", mono=True)
    d.arrow(40 + len(added) * 306 - 20, 465, 40 + len(added) * 306 + 70, 465)
    d.text(
        40 + len(added) * 306 + 85, 470, code("sched.scheduler:Scheduler.schedule"), size=15, fill="accent", mono=True
    )
    d.paragraph(
        40, 590,
        "In vLLM the first two stops run in the front-end process, which sends msgpack over ZMQ; the last two "
        "run in the engine-core process. Here all four are plain calls, in the same order.", 1200, fill="dim",
    )  # fmt: skip
    return d


def schedule_two_queues() -> Drawing:
    """schedule() and its two queues, in a step that decodes, prefills and admits."""
    trace = stored("mixed-batch")
    step = next(
        s for s in sorted(trace.steps) if s >= 0 and len({c.queue for c in _only(trace, RequestConsidered, s)}) == 2
    )
    considered = _only(trace, RequestConsidered, step)
    started, scheduled = _only(trace, StepStarted, step)[0], _only(trace, StepScheduled, step)[0]
    before, after = trace.at(step=step, after="step_started"), trace.at(step=step, after="step_scheduled")
    d = Drawing(
        f"schedule() and its two queues: step {step} of the scenario mixed-batch",
        "Running requests first, then the waiting ones, while budget, seats and blocks last. No prefill or decode "
        "phase: each request lets its computed tokens catch up with its known ones.",
    )
    for x, title, state in ((40, "before", before), (1010, "after", after)):
        d.text(x, 150, title, size=17, weight=650)
        for k, (name, queue) in enumerate((("running", state.running), ("waiting", state.waiting))):
            d.box(x, 165 + k * 175, 230, 160)
            d.text(x + 12, 190 + k * 175, name, size=15, fill="dim")
            for i, request_id in enumerate(queue):
                r = state.requests[request_id]
                d.cell(
                    x + 12,
                    202 + k * 175 + i * 38,
                    206,
                    32,
                    f"{request_id}: {r.num_computed_tokens} of {len(r.token_ids)}",
                    stroke=request_id,
                    ink=request_id,
                )
    y = 165.0
    for c in considered:
        d.box(320, y, 640, 96, stroke=c.request_id)
        d.text(336, y + 28, f"{c.request_id} from {c.queue}", size=17, weight=650, fill=c.request_id)
        d.text(
            336,
            y + 54,
            f"wants {c.num_tokens_wanted}, granted {c.num_tokens_granted}: {CONSIDERED_REASONS[c.reason]}",
            size=15,
        )
        d.text(336, y + 79, f"budget {c.budget_before} → {c.budget_after}", size=14, fill="dim", mono=True)
        y += 108
    d.arrow(275, 330, 315, 330)
    d.arrow(965, 330, 1005, 330)
    total, left = started.token_budget, 320.0
    d.text(320, 548, f"token budget of the step: {total}", size=15, fill="dim")
    for request_id, granted in scheduled.num_scheduled_tokens.items():
        width = 640 * granted / total
        d.cell(
            left,
            560,
            width - 2,
            40,
            f"{request_id}·{granted}" if width > 44 else granted,
            stroke=request_id,
            ink=request_id,
        )
        left += width
    if left < 959:
        d.box(left, 560, 960 - left, 40, dashed=True)
    d.text(
        320,
        650,
        f"{code('sched.scheduler:Scheduler._schedule_running')} then "
        f"{code('sched.scheduler:Scheduler._schedule_waiting')}",
        size=14,
        fill="accent",
        mono=True,
    )
    return d


def allocate_slots() -> Drawing:
    """allocate_slots: hits, new blocks, the block table and the free queue."""
    trace = stored("prefix-hit")
    allocated = next(e for e in _only(trace, SlotsAllocated) if any(e.hit_block_ids))
    matched = next(e for e in _only(trace, PrefixMatched, allocated.step) if e.request_id == allocated.request_id)
    before = trace.at(seq=matched.seq)
    after = trace.at(seq=allocated.seq)
    request = after.requests[allocated.request_id]
    size = after.block_sizes[0]
    d = Drawing(
        "allocate_slots(): from tokens to blocks",
        f"Request {allocated.request_id} begins like one that has finished. Full blocks that are still cached are "
        "taken as they are; the rest gets new blocks from the front of the free queue.",
    )
    tokens = request.token_texts or [str(t) for t in request.token_ids]
    width = min(84.0, 1180 / len(tokens))
    d.text(40, 150, f"the {len(tokens)} known tokens of {allocated.request_id}", size=16, weight=650)
    for i, text in enumerate(tokens):
        hit = i < matched.num_computed_tokens
        d.cell(
            40 + i * width,
            164,
            width - 3,
            40,
            text.strip() or "·",
            fill="hit" if hit else "paper",
            stroke="dim" if hit else request.request_id,
            size=min(15, width / 5),
        )
    end = 40 + matched.num_computed_tokens * width
    d.text(40, 230, f"hit: {matched.num_computed_tokens} tokens, not computed again", size=15, fill="dim")
    d.text(end + 4, 230, f"new: {allocated.num_new_tokens} tokens to compute", size=15, fill=request.request_id)
    table = request.block_ids[0]
    d.text(40, 300, f"block table of {allocated.request_id} (blocks of {size} tokens)", size=16, weight=650)
    for i, block in enumerate(table):
        is_hit = block in allocated.hit_block_ids[0]
        x = 40 + i * 200
        d.box(x, 316, 184, 64, stroke="dim" if is_hit else request.request_id, fill="hit" if is_hit else "paper")
        d.text(x + 12, 342, f"logical {i} → block {block}", size=15, weight=650)
        d.text(x + 12, 366, "hit" if is_hit else "new", size=14, fill="dim")
        d.arrow(x + 92, 382, 40 + block * 74 + 33, 470, stroke="accent")
    d.text(700, 455, "the pool, in physical order", size=16, weight=650)
    for block in range(after.num_blocks):
        is_now, was = after.state_of_block(block), before.state_of_block(block)
        fill = "wash" if is_now == "free" else "hit" if is_now == "cached" else "paper"
        stroke = request.request_id if block in table else "line"
        d.cell(
            40 + block * 74,
            474,
            68,
            46,
            "∅" if block == 0 else block,
            fill=fill,
            stroke=stroke,
            thick=2.5 if block in table else 1.2,
        )
        d.text(40 + block * 74 + 34, 540, is_now if is_now == was else f"{was} →", size=12, fill="dim", anchor="middle")
        if is_now != was:
            d.text(40 + block * 74 + 34, 556, is_now.replace("_", " "), size=12, fill="dim", anchor="middle")
    taken = [e.block_id for e in _only(trace, BlockAllocated, allocated.step)]
    d.text(40, 605, f"free queue before: {list(before.free_queue)}", size=15, mono=True)
    d.text(
        40,
        632,
        f"free queue after:  {list(after.free_queue)}   (hits leave from the middle, new ones {taken} from the front)",
        size=15,
        mono=True,
    )
    d.text(
        40,
        672,
        f"needed: {sum(allocated.needed_from_free_hits)} free hits + {sum(allocated.needed_new)} new "
        f"≤ {allocated.num_free_before} free",
        size=15,
        fill="accent",
    )
    d.text(
        700,
        672,
        f"{code('kv.manager:KVCacheManager.allocate_slots')}, {code('kv.block_pool:BlockPool.get_new_blocks')}",
        size=14,
        fill="accent",
        mono=True,
    )
    return d


def kv_cache_init() -> Drawing:
    """KV-cache initialization: from layers and bytes to groups, blocks and buffers."""
    trace = stored("mixed-batch")
    specs, config, memory = _only(trace, KvSpec), _only(trace, KvConfig)[0], _only(trace, KvAllocated)[0]
    spec = specs[0]
    d = Drawing(
        "KV-cache initialization: from layers and bytes to blocks",
        "Every layer says what one block costs, layers that forget alike form a group, the bytes decide how many "
        "blocks there are, and the memory is allocated once.",
    )
    width = spec.page_bytes // (2 * spec.block_size * spec.num_kv_heads * spec.head_dim)
    d.card(40, 130, 280, 250, "1 · what a layer needs", [
        f"{len(specs)} layers of {spec.kind_of_attention} attention",
        f"2 (key, value) · {spec.block_size} tokens · {spec.num_kv_heads} KV heads · {spec.head_dim} numbers · "
        f"{width} bytes",
        f"= {spec.page_bytes:,} bytes per layer and block",
    ])  # fmt: skip
    d.card(350, 130, 280, 250, "2 · groups", [
        *(f"group {i}: {len(g.layers)} layers, {g.kind_of_attention}" for i, g in enumerate(config.groups)),
        "Groups separate layers that forget tokens at different times. Grouped-query attention makes pages smaller, "
        "not more groups.",
    ])  # fmt: skip
    d.card(660, 130, 280, 250, "3 · blocks", [
        f"{spec.page_bytes:,} bytes × {len(config.tensors)} buffers = {config.bytes_per_block:,} bytes per block",
        f"{config.num_blocks} blocks, of which block 0 is the null block: {config.num_blocks - 1} hold tokens",
        f"{(config.num_blocks - 1) * spec.block_size} slots",
    ])  # fmt: skip
    d.card(970, 130, 270, 250, "4 · memory", [
        f"{len(memory.bytes)} buffers of {memory.bytes[0]:,} bytes, {memory.dtype}",
        f"a layer views its buffer as {memory.shapes[0]}",
        "[key/value, block, token in block, head, number]",
    ])  # fmt: skip
    for x in (322, 632, 942):
        d.arrow(x, 255, x + 26, 255)
    for x, name in (
        (54, "worker.worker:Worker.get_kv_cache_specs"),
        (364, "kv.grouping:get_kv_cache_groups"),
        (674, "kv.initialize:get_kv_cache_config"),
        (984, "worker.kv_memory:allocate_kv_cache"),
    ):
        d.text(x, 366, code(name), size=12.5, fill="accent", mono=True)
    d.text(40, 440, f"one buffer: {memory.shapes[0][1]} blocks, keys above, values below", size=16, weight=650)
    count = min(memory.shapes[0][1], 24)
    for half in range(2):
        for block in range(count):
            d.cell(
                40 + block * 47,
                456 + half * 62,
                43,
                54,
                "∅" if block == 0 else block,
                fill="wash" if block == 0 else "paper",
            )
        d.text(40 + count * 47 + 8, 490 + half * 62, ("keys", "values")[half], size=15, fill="dim")
    d.paragraph(
        40,
        620,
        "vLLM allocates flat bytes and then views them; buffers are shared between the groups of a hybrid "
        "model, because a block id is held by one group at a time.",
        1180,
        fill="dim",
    )
    return d


def worker_inputs() -> Drawing:
    """_update_states and _prepare_inputs on the [2, 5, 3] example."""
    trace = stored("two-five-three")
    step = 0
    inputs, slots = _only(trace, InputsPrepared, step)[0], _only(trace, SlotsMapped, step)[0]
    tables, ordered = _only(trace, TablesGathered, step)[0], _only(trace, BatchOrdered, step)[0]
    d = Drawing(
        f"_prepare_inputs(): {ordered.num_scheduled_tokens} tokens become one flat batch of {len(slots.token)}",
        f"Rows of the block table are K = {tables.table_stride} wide. {slots.table_index} are places in the flattened "
        "table, not block ids; the ids stand there.",
    )
    d.text(40, 160, f"block table, rows of K = {tables.table_stride}", size=16, weight=650)
    for row, (request_id, table) in enumerate(zip(tables.request_ids, tables.block_table, strict=True)):
        d.text(40, 200 + row * 46, request_id, size=16, weight=700, fill=request_id)
        for k in range(tables.table_stride):
            known = k < len(table)
            d.cell(
                90 + k * 48,
                178 + row * 46,
                44,
                34,
                table[k] if known else "",
                stroke=request_id if known else "line",
                fill="paper" if known else "wash",
            )
        d.text(
            90 + tables.table_stride * 48 + 8,
            200 + row * 46,
            f"from index {row * tables.table_stride}",
            size=13,
            fill="dim",
            mono=True,
        )
    requests = inputs.req_indices
    rows: list[tuple[str, list[int] | list[str]]] = [
        ("token id", inputs.input_ids),
        ("req_indices: row", requests),
        ("positions", slots.position),
        (f"// {slots.block_size}: logical block", slots.logical_block),
        ("row · K + logical: table index", slots.table_index),
        ("table there: block", slots.block_id),
        (f"% {slots.block_size}: offset", slots.offset),
        (f"block · {slots.block_size} + offset: slot", slots.slot),
    ]
    top, width = 360, 84
    for i, (name, values) in enumerate(rows):
        last = i == len(rows) - 1
        d.text(40, top + 24 + i * 38, name, size=15, weight=700 if last else 400)
        for token, value in enumerate(values):
            request_id = slots.request_id[token]
            d.cell(
                320 + token * width, top + i * 38, width - 6, 32, value, stroke=request_id, thick=2.5 if last else 1.2
            )
    d.text(830, 200, f"query_start_loc {ordered.query_start_loc}", size=15, mono=True)
    d.text(830, 228, f"seq_lens        {inputs.seq_lens}", size=15, mono=True)
    d.text(830, 256, f"logits_indices  {inputs.logits_indices}", size=15, mono=True)
    d.text(
        830,
        290,
        code("worker.persistent_batch:PersistentBatchRunner._update_states"),
        size=12.5,
        fill="accent",
        mono=True,
    )
    d.text(
        830,
        310,
        code("worker.persistent_batch:PersistentBatchRunner._prepare_inputs"),
        size=12.5,
        fill="accent",
        mono=True,
    )
    d.text(830, 330, code("kernels.slot_mapping:compute_slot_mapping"), size=12.5, fill="accent", mono=True)
    return d


def attention_writes_and_reads() -> Drawing:
    """Where attention uses slot_mapping and where block_table."""
    trace = stored("two-five-three")
    step = 0
    written, reads = _only(trace, KvWritten, step)[0], _only(trace, KvRead, step)
    metadata, inputs = _only(trace, MetadataBuilt, step)[0], _only(trace, InputsPrepared, step)[0]
    reads = [r for r in reads if r.layer == written.layer]
    slots = _only(trace, SlotsMapped, step)[0]
    d = Drawing(
        "Attention writes by slot_mapping and reads by block_table",
        "Writing a key and value needs one slot per new token. Reading needs the whole row of blocks and the length of "
        "each request. In every layer all writes come before any read.",
    )
    d.card(40, 130, 330, 150, "write", [
        f"keys and values of {len(written.slot)} new tokens",
        f"slot_mapping {written.slot}",
    ])  # fmt: skip
    d.text(54, 268, code("kernels.reshape_and_cache:reshape_and_cache"), size=13, fill="accent", mono=True)
    d.card(910, 130, 330, 190, "read", [
        f"queries of {metadata.num_actual_tokens} tokens, at most {metadata.max_query_len} of one request",
        f"query_start_loc, seq_lens {inputs.seq_lens}",
        "block_table: " + ", ".join(f"{r.request_id} {r.block_ids}" for r in reads),
    ])  # fmt: skip
    d.text(924, 308, code("kernels.paged_attention:paged_attention"), size=13, fill="accent", mono=True)
    d.card(440, 130, 400, 150, "forward context", [
        "set once around the forward pass, read in one place by the layer's name",
        "a module-level variable in vLLM 0.14 too, not a thread-local",
    ])  # fmt: skip
    d.text(454, 268, code("attention.layer:Attention.forward"), size=13, fill="accent", mono=True)
    d.text(40, 372, f"the cache of {written.layer}: what the writer itself reported", size=16, weight=650)
    owner = dict(zip(slots.slot, slots.request_id, strict=True))
    token_of = dict(zip(written.slot, written.token, strict=True))
    size = slots.block_size
    blocks = max(written.block_id) + 2
    cell = min(86.0, 1180 / blocks)
    for block in range(blocks):
        x = 40 + block * cell
        d.text(x + cell / 2 - 3, 402, "∅" if block == 0 else f"block {block}", size=13, fill="dim", anchor="middle")
        for offset in range(size):
            slot = block * size + offset
            if slot in token_of:
                d.cell(
                    x,
                    412 + offset * 46,
                    cell - 8,
                    40,
                    f"t{token_of[slot]}",
                    stroke=owner[slot],
                    ink=owner[slot],
                    thick=2.5,
                )
            else:
                d.cell(x, 412 + offset * 46, cell - 8, 40, "", fill="wash")
            d.text(x + 4, 412 + offset * 46 + 12, slot, size=9, fill="dim", mono=True)
    bottom = 412 + size * 46 + 12
    for k, read in enumerate(reads):
        y = bottom + 34 + k * 44
        d.text(40, y, f"{read.request_id} reads", size=15, weight=650, fill=read.request_id)
        for block in read.block_ids:
            d.cell(150 + (block - 1) * 62, y - 21, 56, 30, block, stroke=read.request_id)
    d.arrow(205, 284, 205, 352, stroke="accent")
    d.arrow(1075, 392, 1075, 326, stroke="accent")
    return d


def index_spaces() -> Drawing:
    """The index spaces of the request-state-table runner."""
    trace = stored("state-rows")
    step = 0
    ordered, slots = _only(trace, BatchOrdered, step)[0], _only(trace, SlotsMapped, step)[0]
    assert ordered.idx_mapping is not None
    d = Drawing(
        "Index spaces: token → batch row → state row → position → block → slot",
        f"The newer runner keeps a request in a fixed state row and sorts each step's batch by number of tokens: "
        f"{ordered.num_scheduled_tokens}. idx_mapping {ordered.idx_mapping} leads from batch row to state row.",
    )
    columns = [("token", 90), ("batch row", 330), ("state row", 560), ("position", 780), ("block", 980), ("slot", 1160)]
    for name, x in columns:
        d.text(x, 150, name, size=16, weight=650, anchor="middle")
    height = 500 / len(slots.token)
    ys = [170 + i * height for i in range(len(slots.token))]
    first = {row: slots.row.index(row) for row in dict.fromkeys(slots.row)}
    middle = {row: ys[first[row]] + (slots.row.count(row) - 1) * height / 2 for row in first}
    for i, y in enumerate(ys):
        request_id, row = slots.request_id[i], slots.row[i]
        d.line(118, y + 17, 295, middle[row] + 17, stroke=request_id)
        d.line(595, middle[row] + 17, 752, y + 17, stroke=request_id)
        d.line(808, y + 17, 945, y + 17, stroke=request_id)
        d.line(1015, y + 17, 1125, y + 17, stroke=request_id)
        d.cell(62, y, 56, 34, slots.token[i], stroke=request_id)
        d.cell(752, y, 56, 34, slots.position[i], stroke=request_id)
        d.cell(945, y, 70, 34, f"{slots.block_id[i]}+{slots.offset[i]}", stroke=request_id)
        d.cell(1125, y, 70, 34, slots.slot[i], stroke=request_id, thick=2.5)
    for row, y in middle.items():
        request_id = ordered.request_ids[row]
        d.line(365, y + 17, 525, y + 17, stroke=request_id, thick=3)
        d.cell(295, y, 70, 34, row, stroke=request_id, thick=2.5)
        d.cell(525, y, 70, 34, ordered.idx_mapping[row], stroke=request_id, thick=2.5)
        d.text(445, y + 10, request_id, size=15, weight=700, fill=request_id, anchor="middle")
    d.text(
        40,
        705,
        f"slot = block · {slots.block_size} + offset;  "
        f"table index = batch row · K {slots.table_stride} + position // {slots.block_size}",
        size=14,
        fill="dim",
        mono=True,
    )
    return d


FIGURES: dict[str, Callable[[], Drawing]] = {
    "1-request-path": request_path,
    "2-schedule": schedule_two_queues,
    "3-allocate-slots": allocate_slots,
    "4-kv-cache-init": kv_cache_init,
    "5-worker-inputs": worker_inputs,
    "6-attention": attention_writes_and_reads,
    "7-index-spaces": index_spaces,
}
