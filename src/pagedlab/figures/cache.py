"""Figures of the cache: allocate_slots() with blocks and tables, and KV-cache initialization."""

from __future__ import annotations

from pagedlab.figures.pick import only
from pagedlab.figures.record import stored
from pagedlab.figures.svg import Drawing
from pagedlab.figures.symbols import code
from pagedlab.trace.events import (
    BlockAllocated,
    KvAllocated,
    KvConfig,
    KvMemory,
    KvSpec,
    PrefixMatched,
    SlotsAllocated,
)

KV_MEMORY = {"num_blocks_given": "as told"}  # how the recorded runs came to their number


def allocate_slots() -> Drawing:
    """allocate_slots: hits, new blocks, the block table and the free queue."""
    trace = stored("prefix-hit")
    allocated = next(e for e in only(trace, SlotsAllocated) if any(e.hit_block_ids))
    matched = next(e for e in only(trace, PrefixMatched, allocated.step) if e.request_id == allocated.request_id)
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
    d.text(1218, 455, "the pool, in physical order", size=16, weight=650, anchor="end")
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
    taken = [e.block_id for e in only(trace, BlockAllocated, allocated.step)]
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
        f"the only condition: {sum(allocated.needed_from_free_hits)} free hits + {sum(allocated.needed_new)} new "
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
    specs, found = only(trace, KvSpec), only(trace, KvMemory)[0]
    config, memory = only(trace, KvConfig)[0], only(trace, KvAllocated)[0]
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
        f"{config.num_blocks} blocks ({KV_MEMORY[found.how]}), of which block 0 is the null block: "
        f"{config.num_blocks - 1} hold tokens",
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
