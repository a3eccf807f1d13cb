// @ts-check
/** Block tables with the tokens in their blocks, and arrows from them into the pool. */
import { brief, el, note, plural, refill, show } from "./dom.js";
import { STATUSES } from "./model.js";
import { hue } from "./paint.js";

const MANY_REQUESTS = 12; // beyond this, one block table at a time
const MOST_BLOCKS = { wide: 24, narrow: 8 }; // of one table
const MOST_CELLS = 64;    // of one block
const MOST_ARROWS = 10;   // of one table, else they cannot be followed
const STATUS_WORDS = { done: "computed in an earlier step", now: "computed in this step", known: "known, not computed yet", empty: "free place" };

export class Tables {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.element = el("div", { class: "tables", onkeydown: (/** @type {KeyboardEvent} */ e) => this.key(e) });
    this.arrows = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.arrows.setAttribute("class", "arrows");
    this.arrows.setAttribute("aria-hidden", "true");
    this.nodes = [this.element];
  }

  draw() {
    const { viewer } = this;
    const chosen = viewer.shownRequest();
    const alone = viewer.request !== null || viewer.meta.requests.length > MANY_REQUESTS;
    const others = alone ? [] : viewer.cursor.state.running.filter((r) => r !== chosen).slice(0, 3);
    const requests = chosen === null ? [] : [chosen, ...others];
    const nobody = viewer.request === null ? "Nobody waits or runs at this moment." : `${viewer.idOf(viewer.request)} neither waits nor runs at this moment.`;
    refill(this.element, ...(requests.length ? requests.map((request) => this.tableOf(request)) : [note(show(nobody))]));
    const first = this.element.querySelector(":focus") ?? this.element.querySelector(".cell.chosen") ?? this.element.querySelector("button");
    if (first) first.tabIndex = 0; // the tab key stops once in the tables; up and down go on from there
    requestAnimationFrame(() => this.drawArrows());
  }

  /** @param {KeyboardEvent} e */
  key(e) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[e.key];
    const buttons = [...this.element.querySelectorAll("button:enabled")];
    const next = buttons[buttons.indexOf(e.target) + (by ?? 0)];
    if (by === undefined || !next) return;
    e.preventDefault();
    /** @type {HTMLElement} */ (e.target).tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  /** A request and its block tables, one per KV-cache group. @param {number} request */
  tableOf(request) {
    const { viewer } = this, id = viewer.idOf(request), r = viewer.cursor.state.request(request);
    const scheduled = viewer.past().find((e) => e.kind === "step_scheduled")?.num_scheduled_tokens[id] ?? 0;
    const now = scheduled ? `, ${scheduled} of them in this step` : "";
    const groups = r.tables.map((_, group) => this.groupOf(request, group, r.computed - scheduled));
    return el("div", { class: "request", "data-request": id },
      el("h3", { style: `--owner:${hue(request)}`, title: show(id) }, brief(id), el("small", {}, ` ${STATUSES[r.status]}, ${r.computed} of ${plural(r.known, "token")} computed${now}`)),
      el("div", { class: "groups" }, ...groups));
  }

  /** One table, or the part of it around the first token of this step.
   * @param {number} request @param {number} group @param {number} from position of that token */
  groupOf(request, group, from) {
    const { meta, cursor } = this.viewer;
    const table = cursor.state.request(request).tables[group], size = meta.block_sizes[group];
    if (!table.length) return note("It holds no blocks.");
    const most = MOST_BLOCKS[this.viewer.isNarrow() ? "narrow" : "wide"], isCut = table.length > most;
    const start = isCut ? Math.max(0, Math.min(table.length - most, Math.floor(from / size) - 4)) : 0;
    const blocks = table.slice(start, start + most).map((block, i) => this.blockOf(request, group, start + i, block, from));
    const notes = [];
    if (meta.block_sizes.length > 1) notes.push(`${this.groupName(group)}, blocks of ${size}`);
    if (isCut) notes.push(`blocks ${start} to ${start + most - 1} of ${table.length}`);
    return el("div", { class: "group" }, ...(notes.length ? [el("small", {}, notes.join(", "))] : []), el("div", { class: "blocks" }, ...blocks));
  }

  /** @param {number} group */
  groupName(group) {
    const { kind, window } = this.viewer.meta.groups[group] ?? {};
    const about = [kind?.replace("_", " "), window && `window ${window}`].filter(Boolean).join(", ");
    return `group ${group}${about ? ` (${about})` : ""}`;
  }

  /** A logical block with the tokens in it.
   * @param {number} request @param {number} group @param {number} logical @param {number} block 0: left the window
   * @param {number} from */
  blockOf(request, group, logical, block, from) {
    const { viewer } = this, size = viewer.meta.block_sizes[group];
    const cells = Array.from({ length: Math.min(size, MOST_CELLS) }, (_, offset) => this.cellOf(request, group, logical * size + offset, block, from));
    if (size > MOST_CELLS) cells.push(el("span", { class: "note" }, `… ${size - MOST_CELLS} more`));
    return el("div", { class: `block${block === viewer.block ? " chosen" : ""}`, "data-block": block },
      el("button", { class: "head", tabindex: -1, "data-key": `${request} ${group} block ${logical}`, title: block ? `block ${block}: its life` : "the null block: this part left the window", onclick: () => viewer.chooseBlock(block) }, `${logical} → ${block || "∅"}`),
      el("div", { class: "cells" }, ...cells));
  }

  /** One place for a token: computed earlier, in this step, known but not computed, or empty.
   * @param {number} request @param {number} group @param {number} position @param {number} block @param {number} from */
  cellOf(request, group, position, block, from) {
    const { viewer } = this, r = viewer.cursor.state.request(request), size = viewer.meta.block_sizes[group];
    const isKnown = position < r.known;
    const status = position >= r.computed ? (isKnown ? "known" : "empty") : position >= from ? "now" : "done";
    const isChosen = viewer.token?.request === request && viewer.token.position === position;
    const where = block ? `slot ${block * size + (position % size)}` : "out of the window";
    return el("button", {
      class: `cell ${status}${block ? "" : " gone"}${isChosen ? " chosen" : ""}`, disabled: !isKnown, tabindex: -1, "data-key": `${request} ${group} ${position}`, "data-position": position,
      title: `position ${position}, offset ${position % size}, ${where}, ${STATUS_WORDS[status]}`, onclick: () => viewer.chooseToken(request, position),
    }, isKnown ? viewer.textAt(request, position) || "·" : "·");
  }

  /** From blocks of the first table, and from the chosen token, to their cells in the pool. */
  drawArrows() {
    const { viewer } = this;
    this.arrows.replaceChildren();
    if (viewer.pool.canvas.clientWidth === 0 || viewer.isNarrow()) return;
    for (const group of this.element.querySelectorAll(".group")) {
      const cell = group.querySelector(".cell.chosen");
      if (cell) this.arrowToPool(cell, Number(cell.closest(".block").dataset.block), "lit");
    }
    const heads = [...this.element.querySelectorAll(".request:first-child .block")];
    if (heads.length > MOST_ARROWS && viewer.block === null) return; // choosing a block shows its own
    for (const head of heads) {
      const block = Number(head.dataset.block);
      if (viewer.block === null || block === viewer.block) this.arrowToPool(head, block, "");
    }
  }

  /** @param {HTMLElement} from @param {number} block @param {string} style */
  arrowToPool(from, block, style) {
    if (!block) return;
    const { size, columns } = this.viewer.pool.layout();
    const [base, pool, box] = [this.viewer.main, this.viewer.pool.canvas, from].map((node) => node.getBoundingClientRect());
    const x1 = box.left - base.left + Math.min(box.width / 2, 40), y1 = box.top - base.top;
    const x2 = pool.left - base.left + (block % columns) * size + size / 2;
    const y2 = pool.top - base.top + Math.floor(block / columns) * size + size / 2;
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M ${x1} ${y1} C ${x1} ${y1 - 40}, ${x2} ${y2 + 60}, ${x2} ${y2}`);
    path.setAttribute("class", style);
    path.dataset.block = String(block);
    this.arrows.append(path);
  }
}
