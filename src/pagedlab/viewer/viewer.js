// @ts-check
/**
 * The page: one moment of the run and what was chosen in it, and views that all show that. A view has `nodes`,
 * which stand in a panel, and draw(), which brings them to the moment. Choices go through the viewer.
 */
import { Controls } from "./controls.js";
import { el, plural, show } from "./dom.js";
import { EventList } from "./events.js";
import { KernelLogs } from "./kernels.js";
import { Lens } from "./lens.js";
import { Cursor, STATUSES } from "./model.js";
import { Theme } from "./paint.js";
import { Pool } from "./pool.js";
import { Queues } from "./queues.js";
import { Tables } from "./tables.js";
import { Lanes, Timeline } from "./timeline.js";

const REST_MS = 30;       // a scrubber that stands still so long has come to rest
const LONG_REQUEST = 100; // tokens whose block tables need the whole width of the page

/** Put a viewer into an element.
 * @param {HTMLElement} host
 * @param {{meta: any, readChunk: (name: string) => string, css: string}} data */
export function mount(host, data) {
  const root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
  root.replaceChildren(el("style", {}, data.css));
  return new Viewer(host, root, data);
}

export class Viewer {
  /** @param {HTMLElement} host @param {ShadowRoot} root @param {{meta: any, readChunk: (name: string) => string}} data */
  constructor(host, root, { meta, readChunk }) {
    this.host = host;
    this.root = root;
    this.meta = meta;
    this.readChunk = readChunk;
    this.cursor = new Cursor(meta, readChunk);
    this.steps = meta.columns.step.length;
    /** @type {number | null} */ this.block = null;   // chosen block
    /** @type {number | null} */ this.request = null; // chosen request, null: follow the events
    /** @type {{request: number, position: number} | null} */ this.token = null;
    /** @type {{step: number, first: number, records: any[], rows: import("./model.js").StepRows | null}} */
    this.stepEvents = { step: -2, first: 0, records: [], rows: null };
    this.goal = -1;       // where to go next; several wishes within a frame become one
    this.busy = false;
    /** @type {Promise<void>} */ this.settled = Promise.resolve();
    const isLong = meta.requests.some((/** @type {any} */ r) => r.tokens.length > LONG_REQUEST);
    this.main = el("div", { class: `viewer${isLong ? " long" : ""}`, tabindex: -1 });
    this.theme = new Theme(this.main);
    this.theme.apply();
    this.controls = new Controls(this);
    this.timeline = new Timeline(this);
    this.lanes = new Lanes(this);
    this.queues = new Queues(this);
    this.pool = new Pool(this);
    this.tables = new Tables(this);
    this.lens = new Lens(this);
    this.kernels = new KernelLogs(this);
    this.events = new EventList(this);
    this.build();
    this.width = 0;
    this.resize = new ResizeObserver(() => (this.main.clientWidth === this.width ? this.tables.drawArrows() : this.draw()));
    this.resize.observe(this.main);
    this.gone = new AbortController();
    this.theme.darkQuery.addEventListener("change", () => this.setTheme(this.theme.chosen), { signal: this.gone.signal });
    void this.goto(this.steps > 1 ? this.lastEventOf(meta.columns.step[0] < 0 ? 1 : 0) : meta.num_events - 1);
  }

  destroy() {
    this.controls.playing = false;
    this.resize.disconnect();
    this.gone.abort();
  }

  // ---------------------------------------------------------------- where we are

  /** Place in `columns` of the step an event belongs to. @param {number} event */
  stepIndex(event) {
    return Cursor.chunkOf(this.meta.columns.first_event, event);
  }

  /** @param {number} stepIndex */
  firstEventOf(stepIndex) {
    return this.meta.columns.first_event[stepIndex] ?? 0;
  }

  /** @param {number} stepIndex */
  lastEventOf(stepIndex) {
    return stepIndex + 1 < this.steps ? this.firstEventOf(stepIndex + 1) - 1 : this.meta.num_events - 1;
  }

  /** @param {number} stepIndex */
  stepName(stepIndex) {
    const step = this.meta.columns.step[stepIndex];
    return step >= 0 ? `step ${step}` : "before the first step";
  }

  /** Move to just after an event; resolves once everything shows it. @param {number} event */
  goto(event) {
    this.goal = Math.max(-1, Math.min(event, this.meta.num_events - 1));
    if (!this.busy) this.settled = this.travel();
    return this.settled;
  }

  async travel() {
    this.busy = true;
    try {
      let reached;
      do {
        reached = this.goal;
        await this.cursor.goto(reached);
        if (!this.isAtRest()) {
          this.drawState(); // a drag stays fluent: the step's records are read where it comes to rest
          await new Promise((next) => setTimeout(next, REST_MS));
          if (this.goal !== reached) continue;
          await this.loadStep(this.stepIndex(reached));
        }
        this.draw();
      } while (this.goal !== reached);
    } finally {
      this.busy = false;
    }
  }

  /** @param {number} delta */
  moveSteps(delta) {
    const index = this.stepIndex(this.goal);
    const target = Math.max(0, Math.min(this.steps - 1, index + (delta < 0 && this.goal < this.lastEventOf(index) ? 0 : delta)));
    const there = delta < 0 && index === target && this.goal >= this.lastEventOf(index) ? index - 1 : target;
    void this.goto(this.lastEventOf(Math.max(0, there)));
  }

  /** The records of a step. @param {number} index */
  async loadStep(index) {
    const first = this.firstEventOf(index);
    const records = this.meta.num_events ? await this.cursor.records(first, this.lastEventOf(index)) : [];
    this.stepEvents = { step: index, first, records, rows: await this.cursor.rows(index) };
  }

  /** Whether the records of the step shown are here: they are read when a drag comes to rest. */
  isAtRest() {
    return this.stepEvents.step === this.stepIndex(this.cursor.event);
  }

  /** Records of this step up to the moment shown; none while a drag has not come to rest. */
  past() {
    if (!this.isAtRest()) return [];
    const { records, first } = this.stepEvents;
    return records.slice(0, Math.max(0, this.cursor.event - first + 1));
  }

  /** The record of the event we stand at. */
  current() {
    return this.stepEvents.records.find((r) => r.index === this.cursor.event);
  }

  // ---------------------------------------------------------------- what was chosen

  /** @param {number} block */
  chooseBlock(block) {
    this.block = block;
    this.pool.draw();
    this.tables.draw();
  }

  /** @param {number} request @param {number} position */
  chooseToken(request, position) {
    this.token = { request, position };
    for (const view of [this.pool, this.queues, this.tables, this.lens, this.kernels]) view.draw();
    this.tables.element.querySelector(".cell.chosen")?.focus();
  }

  /** Choose a request, or no longer. @param {number} request */
  chooseRequest(request) {
    this.request = this.request === request ? null : request;
    this.draw();
  }

  forget() {
    this.block = this.request = this.token = null;
    this.draw();
  }

  /** The request whose tables are shown: the chosen one, else the chosen token's, the one the event is about, or the first. */
  shownRequest() {
    const { state } = this.cursor;
    if (this.request !== null) return state.requests.has(this.request) ? this.request : null;
    const candidates = [this.token?.request ?? -1, this.requestOf(this.current()?.request_id)];
    return candidates.find((request) => state.requests.has(request)) ?? state.running[0] ?? state.waiting[0] ?? null;
  }

  /** The blocks that hold the chosen token, one per KV-cache group. */
  litBlocks() {
    if (!this.token) return [];
    const { request, position } = this.token;
    const tables = this.cursor.state.requests.get(request)?.tables ?? [];
    return tables.map((table, group) => table[Math.floor(position / this.meta.block_sizes[group])]).filter((block) => block);
  }

  /** @param {number} request @returns {string} */
  idOf(request) {
    return this.meta.requests[request].id;
  }

  /** The request with an id, -1 for none. @param {string | undefined} id @returns {number} */
  requestOf(id) {
    return this.meta.requests.findIndex((/** @type {any} */ r) => r.id === id);
  }

  /** @param {number} request @param {number} position */
  textAt(request, position) {
    const token = this.meta.requests[request].tokens[position];
    return show(this.meta.token_texts[token] ?? `#${token}`);
  }

  // ---------------------------------------------------------------- the page

  build() {
    const panel = (/** @type {string} */ title, /** @type {string} */ area, /** @type {{nodes: Node[]}} */ view) =>
      el("section", { class: `panel ${area}` }, el("h2", {}, title), ...view.nodes);
    this.main.append(
      el("header", {},
        el("h1", {}, "pagedlab"), el("span", { class: "about" }, show(this.aboutLine())),
        el("button", { class: "theme", title: "light or dark (t)", "aria-label": "light or dark", onclick: () => this.toggleTheme() }, "◐")),
      this.controls.nav,
      panel("Tokens per step against the budget, and blocks in use", "time", this.timeline),
      panel("Requests through time", "lane", this.lanes),
      panel("Queues", "queue", this.queues),
      panel("Block pool, in physical order", "grid", this.pool),
      panel("Block tables", "table", this.tables),
      panel("Token lens: from token to slot", "token", this.lens),
      panel("What the kernels report", "kernel", this.kernels),
      panel("Events of this step", "event", this.events),
      this.tables.arrows);
    this.root.append(this.main);
  }

  aboutLine() {
    const { header: { model, config, record }, block_sizes, num_blocks, is_complete } = this.meta;
    const parts = [model.name ?? "no model"];
    if (model.num_hidden_layers) parts.push(plural(model.num_hidden_layers, "layer"));
    const sizes = [...new Set(block_sizes)];
    const each = sizes.length === 1 ? plural(sizes[0], "token") : `${sizes.join(" and ")} tokens`;
    parts.push(`${plural(num_blocks - 1, "usable block")} of ${each} (and the null block)`);
    if (config.policy) parts.push(String(config.policy));
    parts.push(`recorded at ${record}`);
    if (!is_complete) parts.push("the trace has no end: it was cut, or still being recorded");
    return parts.join(" · ");
  }

  toggleTheme() {
    this.setTheme(this.theme.name === "dark" ? "light" : "dark");
  }

  /** @param {"light" | "dark" | null} name null: as the system has it */
  setTheme(name) {
    this.theme.chosen = name;
    this.theme.apply();
    this.draw();
  }

  isNarrow() {
    return this.main.clientWidth < 640;
  }

  /** The views that follow from the state alone. */
  drawState() {
    if (this.main.clientWidth !== this.width) this.theme.measure();
    this.width = this.main.clientWidth;
    const index = this.stepIndex(this.cursor.event);
    this.controls.draw(index);
    this.timeline.draw(index);
    this.lanes.draw(index);
    this.pool.draw();
    this.queues.draw();
  }

  draw() {
    this.drawState();
    this.tables.draw();
    this.lens.draw();
    this.kernels.draw();
    this.events.draw();
    this.host.dispatchEvent(new CustomEvent("moved", { detail: { event: this.cursor.event } }));
  }

  /** The state as plain data, for tests. */
  snapshot() {
    const { state } = this.cursor;
    const id = (/** @type {number} */ request) => this.meta.requests[request]?.id ?? null;
    /** @type {Record<string, any>} */ const requests = {};
    /** @type {Record<string, any>} */ const refs = {};
    /** @type {Record<string, any>} */ const cached = {};
    /** @type {Record<string, any>} */ const rows = {};
    for (const [i, r] of state.requests) requests[id(i)] = { status: STATUSES[r.status], computed: r.computed, known: r.known, tables: r.tables };
    for (let b = 0; b < state.numBlocks; b += 1) {
      if (state.refs[b]) refs[b] = state.refs[b];
      if (state.hashed[b]) cached[b] = state.hashes[b].toString(16).padStart(8, "0");
    }
    for (const [row, i] of state.rows) rows[row] = id(i);
    return { waiting: state.waiting.map(id), running: state.running.map(id), free_queue: state.freeQueue(), ref_counts: refs, cached_blocks: cached, requests, rows };
  }
}

/** The entry point of anywidget. */
export default {
  /** @param {{model: any, el: HTMLElement}} context */
  render({ model, el: element }) {
    element.dataset.lmSuppressShortcuts = "true"; // JupyterLab's keys edit cells; here they belong to the viewer
    const chunks = model.get("chunks");
    const viewer = mount(element, { meta: JSON.parse(model.get("meta")), readChunk: (name) => chunks[name], css: model.get("css") });
    const follow = () => { // JupyterLab says on its body which theme it has
      const isLight = document.body.dataset.jpThemeLight;
      if (isLight) viewer.setTheme(isLight === "true" ? "light" : "dark");
    };
    const themes = new MutationObserver(follow);
    themes.observe(document.body, { attributeFilter: ["data-jp-theme-light"] });
    follow();
    return () => { themes.disconnect(); viewer.destroy(); };
  },
};
