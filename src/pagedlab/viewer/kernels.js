// @ts-check
/** What the kernels report of themselves: the cells of the cache they wrote, and the blocks they read. */
import { el, note, plural, refill, show } from "./dom.js";

const MOST_LOGGED = 32; // blocks of one log

export class KernelLogs {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    /** @type {string | null} */ this.layer = null; // whose log is shown, null: the latest
    this.element = el("div", { class: "writes" });
    this.nodes = [this.element];
  }

  draw() {
    const { record } = this.viewer.meta.header;
    const written = this.viewer.past().filter((e) => e.kind === "kv_written");
    if (!written.length) {
      refill(this.element, note(record === "kernels" ? "Nothing has been written in this step yet." : `Recorded at ${record}; the write log needs --record kernels.`));
      return;
    }
    const log = written.find((e) => e.layer === this.layer) ?? written.at(-1);
    const select = el("select", { "aria-label": "layer", "data-key": "layer", onchange: () => { this.layer = select.value; this.draw(); } },
      ...written.map((e) => el("option", { value: e.layer, selected: e === log }, show(e.layer))));
    refill(this.element,
      el("label", { class: "note" }, "layer ", select),
      note(show(`Written by ${log.source}: ${plural(log.slot.length, "slot")}. A cell shows the beginning of its checksum; · was not written in this step.`)),
      this.writtenBlocks(log), ...this.readsOf(log));
  }

  /** @param {number} block @param {HTMLElement[]} cells @param {string} [kind] */
  blockOf(block, cells, kind = "") {
    return el("div", { class: `block ${kind}`, "data-block": block },
      el("button", { class: "head", "data-key": `${kind}${block}`, onclick: () => this.viewer.chooseBlock(block) }, `block ${block}`),
      el("div", { class: "cells" }, ...cells));
  }

  /** The cells of the cache that a write log fills. @param {any} log */
  writtenBlocks(log) {
    const { viewer } = this, size = viewer.meta.block_sizes[log.group];
    /** @type {Map<number, Map<number, number>>} */ const blocks = new Map(); // block -> offset -> place in the log
    log.block_id.forEach((/** @type {number} */ block, /** @type {number} */ i) => {
      if (!blocks.has(block)) blocks.set(block, new Map());
      blocks.get(block)?.set(log.offset[i], i);
    });
    const lit = viewer.token && viewer.lens.recordedPlace(viewer.token.request, viewer.token.position, log.group)?.flat;
    const cell = (/** @type {number | undefined} */ i) => i === undefined
      ? el("span", { class: "cell done", title: "not written in this step" }, "·")
      : el("span", { class: `cell now${log.token[i] === lit ? " chosen" : ""}`, title: `token ${log.token[i]} → slot ${log.slot[i]}, checksum ${log.checksum[i].toString(16)}` }, log.checksum[i].toString(16).slice(0, 4));
    const drawn = [...blocks].slice(0, MOST_LOGGED).map(([block, offsets]) => this.blockOf(block, Array.from({ length: size }, (_, offset) => cell(offsets.get(offset)))));
    if (blocks.size > drawn.length) drawn.push(note(`… ${plural(blocks.size - drawn.length, "more block")}`));
    return el("div", { class: "blocks" }, ...drawn);
  }

  /** What the attention kernel read for the chosen query token, and which of it counts for that token. @param {any} log */
  readsOf(log) {
    const { viewer } = this, chosen = viewer.lens.token();
    if (!chosen) return [];
    const { request, position } = chosen, id = viewer.idOf(request);
    const read = viewer.past().find((e) => e.kind === "kv_read" && e.layer === log.layer && e.request_id === id);
    if (!read) return [note(show(`The attention of ${log.layer} has not read anything for ${id} in this step yet.`))];
    const whole = `Read by ${read.source} for the queries of ${id}: block${read.block_ids.length === 1 ? "" : "s"} ${read.block_ids.join(", ")}.`;
    const r = viewer.cursor.state.requests.get(request);
    if (!r?.tables[log.group].length) return [note(show(`${whole} It has given its blocks back since.`))];
    const window = viewer.meta.groups[log.group]?.window ?? Infinity;
    const size = viewer.meta.block_sizes[log.group], table = r.tables[log.group];
    const cell = (/** @type {number} */ key) => {
      const isSeen = key <= position && key > position - window;
      const title = `position ${key}: ${isSeen ? "this query sees it" : "masked"}`;
      return el("span", { class: `cell ${isSeen ? "seen" : "masked"}`, title }, key < r.known ? viewer.textAt(request, key) : "·");
    };
    const drawn = read.block_ids.slice(0, MOST_LOGGED).map((/** @type {number} */ block) =>
      this.blockOf(block, Array.from({ length: size }, (_, offset) => cell(table.indexOf(block) * size + offset)), "read"));
    const isQuery = viewer.lens.recordedPlace(request, position, log.group) !== null;
    const query = isQuery ? `The query at position ${position} of ${id}` : `No query at position ${position} of ${id} ran in this step; one there`;
    return [
      note(show(`${query} sees the framed keys. ${whole}`)),
      el("div", { class: "blocks" }, ...drawn)];
  }
}
