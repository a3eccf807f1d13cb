"""What the engine is, its memory with the terms of the arithmetic, and the legend."""

from __future__ import annotations

from rich.text import Text

from pagedlab.kv.specs import DTYPE_BYTES
from pagedlab.trace.events import (
    EngineSnapshot,
    Event,
    KvAllocated,
    KvConfig,
    KvGroup,
    KvMemory,
    KvSpec,
    Scalar,
    TraceHeader,
)
from pagedlab.viz.layout import GLUE, Part, Pen, glue
from pagedlab.wording import plural

HOW_FOUND = {
    "stated": "as stated",
    "share_of_free_ram": "a share of the free memory",
    "profiled": "what a profiling run left over",
    "num_blocks_given": "counted from the number of blocks given",
}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: int) -> str:
    """``49,152 B`` stays exact below 10 KiB; above, the unit that reads well."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and num_bytes >= 10_240 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if unit == 0:
        return f"{num_bytes:,} B"
    return f"{value:,.0f} {UNITS[unit]}" if value == int(value) else f"{value:,.1f} {UNITS[unit]}"


def opening(pen: Pen, header: TraceHeader | None, events: list[Event], engine: int | None) -> list[Text]:
    """First the warning that changes how the rest is read, then model, engine, memory."""
    name = "pagedlab" if engine is None else f"pagedlab · engine {engine}"
    lines: list[Text] = []
    if header is not None and header.record == "kernels":
        lines += pen.paragraph(("runs eagerly: ", "bad"), "level `kernels` reads back what the kernels report, so no "
                               "CUDA graph is used and times are not those of an ordinary run")
    if header is not None:
        lines.append(pen.title(name, (f"{pen.plain(header.pagedlab, 20)} · recorded at {header.record}", "dim")))
        inside = pen.inside
        if header.model:
            lines += pen.section("model", inside.paragraph(*_model(inside, header.model), hang=2))
        elif header.config:
            lines += pen.section("model", inside.paragraph("none: what would be sampled comes from a script; #7 is the "
                                                           "token with id 7", hang=2))
        if header.config:
            lines += pen.section("engine", inside.paragraph(*_config(inside, header.config), hang=2))
    else:
        lines.append(pen.title(name, ("no header", "bad")))
    return lines + pen.section("memory", _memory(pen.inside, events)) + pen.section("start", _start(pen.inside, events))


def _model(pen: Pen, model: dict[str, Scalar | list[Scalar]]) -> list[Part]:
    """Known facts in a sentence; the rest is in the file."""

    def get(*names: str) -> str | None:
        value = next((model[name] for name in names if model.get(name) is not None), None)
        return None if value is None else f"{value:,}" if type(value) is int else pen.plain(str(value), 60)

    def several(number: str, noun: str) -> str:
        return f"{number} {noun}" if number == "1" else f"{number} {noun}s"

    parts: list[Part] = [(get("name", "model") or "unnamed", "number")]
    if kind := get("architecture", "model_type"):
        parts.append(f" ({kind})")
    facts = []
    if layers := get("layers", "num_hidden_layers", "num_layers"):
        facts.append(several(layers, "layer"))
    heads, kv_heads = get("heads", "num_attention_heads"), get("kv_heads", "num_key_value_heads", "num_kv_heads")
    if heads:
        shared = f" that share {several(kv_heads, 'key-value head')}" if kv_heads else ""
        facts.append(several(heads, "query head") + shared)
    for label, value in (("head dim", get("head_dim", "head_size")), ("hidden", get("hidden_size", "hidden")),
                         ("vocabulary", get("vocab_size"))):
        if value:
            facts.append(f"{label} {value}")
    if value := get("num_parameters", "parameters"):
        facts.append(f"{value} parameters")
    if value := get("dtype"):
        facts.append(value)
    return [*parts, ": " if facts else "", " · ".join(facts)]


def _config(pen: Pen, config: dict[str, Scalar]) -> list[Part]:
    facts = []
    words = (
        ("block_size", "blocks of {} token(s)"), ("max_num_batched_tokens", "token budget {} a step"),
        ("max_num_seqs", "at most {} request(s) at once"), ("max_model_len", "at most {} token(s) a request"),
        ("policy", "policy {}"), ("device", "on {}"), ("attention_backend", "attention {}"), ("runner", "runner {}"),
    )
    for name, sentence in words:
        value = config.get(name)
        if value is not None:
            sentence = sentence.replace("(s)", "" if value == 1 else "s")
            facts.append(sentence.format(f"{value:,}" if type(value) is int else pen.plain(str(value), 40)))
    for name, label in (("enable_prefix_caching", "prefix caching"), ("enable_chunked_prefill", "chunked prefill")):
        if name in config:
            facts.append(f"{label} {'on' if config[name] else 'off'}")
    return [" · ".join(facts)]


def _memory(pen: Pen, events: list[Event]) -> list[Text]:
    """2 · block_size · kv_heads · head_dim · bytes = a layer's block; … × layers; budget ÷ that = blocks."""
    specs = [event for event in events if isinstance(event, KvSpec)]
    memory = next((event for event in events if isinstance(event, KvMemory)), None)
    config = next((event for event in events if isinstance(event, KvConfig)), None)
    allocated = next((event for event in events if isinstance(event, KvAllocated)), None)
    lines: list[Text] = []
    kinds: dict[tuple[object, ...], list[KvSpec]] = {}
    for spec in specs:
        kinds.setdefault((spec.kind_of_attention, spec.block_size, spec.num_kv_heads, spec.head_dim, spec.dtype,
                          spec.sliding_window, spec.page_bytes), []).append(spec)
    for same in kinds.values():
        spec = same[0]
        width = DTYPE_BYTES.get(spec.dtype)
        parts: list[Part] = ["one block of one layer = "]
        if width is not None and 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * width == spec.page_bytes:
            parts.append(f"2 (key, value) · {plural(spec.block_size, 'token')} · "
                         f"{plural(spec.num_kv_heads, 'kv head')} · {spec.head_dim} dims · {width} bytes = ")
        parts += [(glue(f"{spec.page_bytes:,} B"), "number")]
        if len(kinds) > 1:
            parts.append(f" ({plural(len(same), 'layer')}, {pen.plain(kind_of(spec))})")
        lines += pen.paragraph(*parts, hang=2)
    if config is not None:
        lines += _blocks(pen, config, memory)
    if allocated is not None:
        shape = " × ".join(map(str, allocated.shapes[0])) if allocated.shapes else ""
        lines += pen.paragraph(
            f"{plural(len(allocated.bytes), 'buffer')}, {size(sum(allocated.bytes))} of "
            f"{pen.plain(allocated.dtype, 12)} on {pen.plain(allocated.device, 16)}",
            (f"; a layer sees {shape}" if shape else "", "dim"), hang=2)
    return lines


def _blocks(pen: Pen, config: KvConfig, memory: KvMemory | None) -> list[Text]:
    lines: list[Text] = []
    pages = [group.page_bytes for group in config.groups]
    layers = config.bytes_per_block // pages[0] if pages and pages[0] and len(set(pages)) == 1 else 0
    if layers and layers * pages[0] == config.bytes_per_block:
        factor = plural(layers, "layer")
        if len(config.groups) > 1:
            factor = f"{plural(layers, 'buffer')} (each shared by one layer of every group)"
        lines += pen.paragraph(f"one block = {pages[0]:,} B × {factor} = ",
                               (glue(f"{config.bytes_per_block:,} B"), "number"), hang=2)
    else:
        lines += pen.paragraph("one block, all buffers = ", (glue(f"{config.bytes_per_block:,} B"), "number"), hang=2)
    usable = config.num_blocks - 1
    tokens = min((group.block_size for group in config.groups), default=0)
    if memory is not None and memory.how == "num_blocks_given":
        parts: list[Part] = [(f"{config.num_blocks:,} blocks", "number"), " given × one block = ",
                             f"{size(config.num_blocks * config.bytes_per_block)}"]
    else:
        how = f" ({HOW_FOUND.get(memory.how) or pen.plain(memory.how)})" if memory is not None else ""
        parts = [f"{config.available_bytes:,} B{how} ÷ one block = ", (f"{config.num_blocks:,} blocks", "number")]
    hold = "holds" if usable == 1 else "hold"
    lines += pen.paragraph(*parts, f"; block 0 is the null block, so {usable:,} {hold} tokens",
                           ": " + glue(f"{usable * tokens:,} slots") if len(config.groups) == 1 else "", hang=2)
    if memory is not None and memory.terms and memory.how != "num_blocks_given":
        terms = " · ".join(f"{pen.plain(key, 40).replace('_', ' ')} {_term(pen, key, value)}"
                           for key, value in memory.terms.items())
        lines += pen.paragraph((terms, "dim"), hang=2)
    if len(config.groups) > 1:
        for i, group in enumerate(config.groups):
            what = f"{plural(len(group.layers), 'layer')}, {pen.plain(kind_of(group))}"
            lines += pen.paragraph(f"group {i}: {what}", hang=2)
        lines += pen.paragraph(("a group collects layers that keep and forget the same tokens; it has nothing to do "
                                "with grouped-query attention", "dim"), hang=2)
    return lines


def kind_of(spec: KvSpec | KvGroup) -> str:
    """``full attention``, ``sliding window of 64 tokens``; a stranger's word is still to be made safe."""
    kind = spec.kind_of_attention.replace("_", " ")
    return kind + (f" of {plural(spec.sliding_window, 'token')}" if spec.sliding_window else " attention")


def _term(pen: Pen, key: str, value: Scalar) -> str:
    if type(value) is int:
        return size(value) if "bytes" in key or "ram" in key or "memory" in key else f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else pen.plain(str(value), 40)


def _start(pen: Pen, events: list[Event]) -> list[Text]:
    """Said only of an engine that was already at work when tracing began."""
    snapshot = next((event for event in events if isinstance(event, EngineSnapshot)), None)
    if snapshot is None or not (snapshot.requests or snapshot.cached_blocks):
        return []
    return pen.paragraph(
        f"the engine was already at work: {len(snapshot.running)} running, {len(snapshot.waiting)} waiting, "
        f"{plural(len(snapshot.ref_counts), 'block')} in use, {plural(len(snapshot.cached_blocks), 'block')} with a "
        f"hash, {len(snapshot.free_queue):,} of {plural(snapshot.num_blocks - 1, 'usable block')} free", hang=2)


def legend(pen: Pen) -> list[Text]:
    """Once; every state has a sign of its own besides its colour."""
    glyphs = pen.glyphs
    space = "_" if glyphs.ascii else "·"
    open_, close = glyphs.known
    pool = (
        (glyphs.in_use, "in_use", "in use"), ("2", "shared", "shared, by 2"),
        (glyphs.cached, "cached", "free but cached: can still be hit"), (glyphs.free, "free", "free"),
        (glyphs.null, "null", "null block, never holds tokens"),
    )
    cells = (
        ("text", "computed", "computed before"), (f"{glyphs.written}text", "written", "computed in this step"),
        (f"{open_}text{close}", "known", "known, but no key and value yet"), (glyphs.empty, "empty", "empty"),
        (space, "computed", "a space"),
    )
    inside = pen.inside
    lines: list[Text] = []
    for label, items in (("blocks", pool), ("tokens", cells)):
        parts: list[Part] = [label + "  "]
        for sign, style, words in items:
            parts += [(sign + GLUE, style), (glue(words), "dim"), "   "]
        lines += inside.paragraph(*parts, hang=8)
    return pen.section("legend", lines)
