// @ts-check
/** Who waits and who runs, each with the scheduler's reason. */
import { brief, el, keepFocus, note, plural, show } from "./dom.js";
import { hue } from "./paint.js";

const MOST_CHIPS = 24; // of one queue

export class Queues {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    /** @type {Map<number, any>} */ this.chips = new Map(); // request -> its elements
    this.stillQuery = matchMedia("(prefers-reduced-motion: reduce)");
    this.element = el("div", { class: "queues" });
    this.nodes = [note("A bar shows the tokens computed, of all that are known."), this.element];
  }

  draw() {
    const { state } = this.viewer.cursor;
    const { said, hits, rest } = this.reasons();
    const from = this.cameFrom();
    const before = this.chipPlaces();
    const column = (/** @type {string} */ name, /** @type {number[]} */ queue) => {
      const items = queue.slice(0, MOST_CHIPS).map((request) => {
        const id = this.viewer.idOf(request), origin = from.get(id);
        const came = origin === "new" ? "just arrived" : origin && origin !== name ? `from ${origin}` : "";
        return this.chip(request, [came, hits.get(id), said.get(id) ?? rest[name]].filter(Boolean).join(": "));
      });
      const { request } = this.viewer;
      const chosen = request !== null && queue.indexOf(request) >= MOST_CHIPS ? `, ${this.viewer.idOf(request)} among them` : "";
      if (queue.length > MOST_CHIPS) items.push(el("li", {}, show(`… ${queue.length - MOST_CHIPS} more${chosen}`)));
      return el("div", { class: "column", "data-queue": name }, el("h3", {}, `${name} (${queue.length})`), el("ol", {}, ...items));
    };
    const refocus = keepFocus(this.element);
    this.element.replaceChildren(column("waiting", state.waiting), column("running", state.running), this.leftColumn());
    refocus();
    this.slideChips(before);
  }

  /** Why each request did or did not move in this step, from the scheduler's own words. */
  reasons() {
    /** @type {Map<string, string>} */ const said = new Map();
    /** @type {Map<string, string>} */ const hits = new Map();
    /** @type {Record<string, any>} */ const rest = {};
    const { reasons } = this.viewer.meta;
    for (const r of this.viewer.past()) {
      if (r.kind === "request_considered") {
        const why = reasons[r.reason] ?? r.reason;
        const numbers = r.num_needed_blocks != null ? ` (needs ${r.num_needed_blocks}, ${r.num_free_blocks} free)` : "";
        const verb = r.outcome === "scheduled" ? `granted ${r.num_tokens_granted} of ${plural(r.num_tokens_wanted, "token")}` : r.outcome;
        said.set(r.request_id, r.reason === "all_tokens" ? verb : `${verb}: ${why}${numbers}`);
      } else if (r.kind === "prefix_matched" && r.num_computed_tokens) {
        hits.set(r.request_id, `${plural(r.num_computed_tokens, "token")} found in the prefix cache`);
      } else if (r.kind === "request_preempted") {
        said.set(r.request_id, `preempted for ${r.on_behalf_of}: ${r.rule}`);
      } else if (r.kind === "queue_not_reached") {
        rest[r.queue] = `not looked at: ${reasons[r.reason] ?? r.reason}`;
      }
    }
    return { said, hits, rest };
  }

  /** Which queue each request stood in when this step began, from the records: request id -> queue. */
  cameFrom() {
    /** @type {Map<string, string>} */ const from = new Map();
    for (const r of this.viewer.past()) {
      if (r.kind === "request_added") from.set(r.request_id, "new");
      if (r.kind === "request_considered" && r.outcome === "scheduled" && r.queue === "waiting") from.set(r.request_id, "waiting");
      if (r.kind === "request_preempted") from.set(r.request_id, "running");
    }
    return from;
  }

  /** A request in a queue, with the reason why it is there; made once, then only brought up to date.
   * @param {number} request @param {string} why */
  chip(request, why) {
    const { viewer } = this, id = viewer.idOf(request), r = viewer.cursor.state.request(request);
    let chip = this.chips.get(request);
    if (!chip) {
      const meter = el("meter", { min: 0 }), count = el("span", { class: "count" }), mark = el("i", {}, "preempted"), reason = el("small", {});
      const button = el("button", { class: "chip", style: `--owner:${hue(request)}`, onclick: () => viewer.chooseRequest(request), "data-request": id }, el("b", { title: show(id) }, brief(id)), meter, count, mark);
      chip = { item: el("li", {}, button, reason), button, meter, count, mark, reason };
      this.chips.set(request, chip);
    }
    const numbers = `${r.computed}/${r.known}`, text = show(why), isChosen = viewer.request === request;
    if (chip.count.textContent !== numbers) {
      chip.count.textContent = numbers;
      chip.meter.max = Math.max(r.known, 1);
      chip.meter.value = r.computed;
      chip.meter.title = `${r.computed} of ${r.known} known tokens computed`;
    }
    if (chip.reason.textContent !== text) chip.reason.textContent = text;
    chip.mark.hidden = r.status !== 2;
    chip.button.setAttribute("aria-label", show(`${id}, ${r.computed} of ${plural(r.known, "token")} computed${r.status === 2 ? ", preempted" : ""}`));
    chip.button.classList.toggle("chosen", isChosen);
    chip.button.classList.toggle("lit", viewer.token?.request === request);
    chip.button.setAttribute("aria-pressed", String(isChosen));
    return chip.item;
  }

  /** Requests that left in this step, so that nobody vanishes without a word. */
  leftColumn() {
    const gone = this.viewer.past().filter((r) => r.kind === "request_finished" || r.kind === "request_refused");
    if (!gone.length) return "";
    const items = gone.slice(0, MOST_CHIPS).map((r) => el("li", {}, show(`${r.request_id}: ${r.finish_reason ? `finished (${r.finish_reason})` : "refused at the door"}`)));
    return el("div", { class: "column left", "data-queue": "left" }, el("h3", {}, `left in this step (${gone.length})`), el("ol", {}, ...items));
  }

  /** Where each request's chip stands on the screen: request id -> box. */
  chipPlaces() {
    /** @type {Map<string, DOMRect>} */ const places = new Map();
    if (this.viewer.meta.requests.length > 2 * MOST_CHIPS || !this.viewer.isAtRest() || this.stillQuery.matches) return places;
    for (const chip of this.element.querySelectorAll(".chip")) places.set(chip.dataset.request, chip.getBoundingClientRect());
    return places;
  }

  /** Let a chip that changed its place slide there. @param {Map<string, DOMRect>} before */
  slideChips(before) {
    if (!before.size) return;
    for (const chip of this.element.querySelectorAll(".chip")) {
      const old = before.get(chip.dataset.request);
      if (!old) continue;
      const now = chip.getBoundingClientRect();
      const dx = old.left - now.left, dy = old.top - now.top;
      if (dx || dy) chip.animate([{ transform: `translate(${dx}px, ${dy}px)`, zIndex: 1 }, { transform: "none" }], { duration: 350, easing: "ease-in-out" });
    }
  }
}
