// @ts-check
/** The records of the step, one a line, and the one we stand at in full. */
import { el, note, show } from "./dom.js";

const MOST_ROWS = 60;
const ENVELOPE = new Set(["kind", "index", "seq", "engine", "step", "t_ns", "proc"]);

export class EventList {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.filterBox = el("input", { type: "search", placeholder: "filter: kind, request or block", "aria-label": "filter events", oninput: () => this.draw() });
    this.list = el("div", { class: "events", role: "listbox", tabindex: 0, "aria-label": "events of this step", onkeydown: (/** @type {KeyboardEvent} */ e) => this.key(e) });
    this.raw = el("pre", { class: "raw" });
    this.nodes = [
      this.filterBox, this.list, this.raw,
      el("p", { class: "note keys" }, "Keys: ← → event · shift + ← → step · home, end · space plays · t light or dark · esc forgets what was chosen · tab from panel to panel; in lanes, pool, block tables and events ↑ ↓ choose.")];
  }

  /** Up and down go along the rows shown. @param {KeyboardEvent} e */
  key(e) {
    const by = { ArrowUp: -1, ArrowDown: 1 }[e.key];
    if (by === undefined) return;
    e.preventDefault();
    const rows = [...this.list.querySelectorAll(".row")].map((row) => Number(row.dataset.index));
    const next = by > 0 ? rows.find((index) => index > this.viewer.goal) : rows.findLast((index) => index < this.viewer.goal);
    if (next !== undefined) void this.viewer.goto(next);
  }

  draw() {
    const { viewer } = this, here = viewer.cursor.event;
    const words = this.filterBox.value.trim().toLowerCase();
    const matching = viewer.stepEvents.records.filter((r) => matches(r, words));
    const at = Math.max(0, matching.findIndex((r) => r.index >= here));
    const from = Math.max(0, Math.min(at - MOST_ROWS / 2, matching.length - MOST_ROWS));
    const items = matching.slice(from, from + MOST_ROWS).map((r) => el("button", {
      class: `row${r.index === here ? " here" : r.index > here ? " future" : ""}`,
      role: "option", id: `event-${r.index}`, "aria-selected": r.index === here, tabindex: -1, "data-index": r.index,
      onclick: () => { this.list.focus({ preventScroll: true }); void viewer.goto(r.index); },
    }, el("code", {}, r.kind), show(` ${summary(r)}`)));
    if (from > 0) items.unshift(note(`… ${from} before`));
    if (matching.length > from + MOST_ROWS) items.push(note(`… ${matching.length - from - MOST_ROWS} more`));
    if (!items.length) items.push(note(words ? "No event of this step matches." : "No events."));
    this.list.replaceChildren(...items);
    const row = this.list.querySelector(".here");
    this.list.setAttribute("aria-activedescendant", row?.id ?? "");
    if (row) this.list.scrollTop = row.offsetTop - this.list.offsetTop - this.list.clientHeight / 2;
    const { index, ...record } = viewer.current() ?? {};
    this.raw.textContent = index === undefined ? "" : show(JSON.stringify(record)).replaceAll(/,"(?=\w+":)/g, ',\n "');
  }
}

/** The telling fields of a record in one line. @param {any} r */
function summary(r) {
  const parts = [];
  for (const [name, value] of Object.entries(r)) {
    if (ENVELOPE.has(name) || value === null || (Array.isArray(value) && !value.length)) continue;
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    parts.push(name === "request_id" ? text : `${name}=${text.length > 42 ? `${text.slice(0, 40)}…` : text}`);
    if (parts.length === 7) break;
  }
  return parts.join(" ");
}

/** Each word names a kind (or a part of it), a request (there may be one per token), or a block. @param {any} r @param {string} words */
function matches(r, words) {
  return words.replace(/block (?=\d)/g, "block").split(/\s+/).every((word) => {
    const block = /^block(\d+)$/.exec(word);
    if (block) return r.block_id === Number(block[1]);
    return r.kind.includes(word) || [r.request_id ?? []].flat().some((id) => id.toLowerCase() === word);
  });
}
