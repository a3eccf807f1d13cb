// @ts-check
/**
 * The page around the model: one scrubber, and panels that all show the same moment. A stranger's
 * text reaches the page only through textContent and canvas text, made visible by show().
 */
import { Cursor, EngineState, STATUSES, inflate, placeInBatch, varints } from "./model.js";

const KINDS_OF_WORK = ["recomputed", "prefill", "decode", "queued", "preempted", "passed over"];
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#6a51a3"];
const SPEEDS = [1, 2, 5, 10, 30];
const REST_MS = 30;       // a scrubber that stands still so long has come to rest
const MANY_REQUESTS = 12; // beyond this, one block table at a time
const MOST_CHIPS = 24;    // of one queue
const MOST_BLOCKS = 24;   // of one table
const MOST_CELLS = 64;    // of one block
const STATUS_WORDS = { done: "computed in an earlier step", now: "computed in this step", known: "known, not computed yet", empty: "free place" };
const DESIGNS = /** @type {const} */ ({ "persistent": "persistent batch", "state-table": "request-state table" });

/** Control, direction and format characters as visible symbols. @param {unknown} value */
export function show(value) {
  return String(value ?? "").replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g, (c) => {
    const code = c.charCodeAt(0);
    if (code === 0x0a) return "⏎";
    if (code === 0x09) return "⇥";
    return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16)}⟩`;
  });
}

/** "1 block", "5 blocks".
 * @param {number} count @param {string} noun */
function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}

/** @param {string} tag @param {Record<string, any>} [attributes] @param {(Node | string)[]} children @returns {any} */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children);
  return node;
}

/** Put a viewer into an element.
 * @param {HTMLElement} host
 * @param {{meta: any, readChunk: (name: string) => string, css: string}} data */
export function mount(host, data) {
  const root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
  root.replaceChildren(el("style", {}, data.css));
  return new Viewer(host, root, data);
}

class Viewer {
  /** @param {HTMLElement} host @param {ShadowRoot} root @param {any} data */
  constructor(host, root, { meta, readChunk }) {
    this.host = host;
    this.root = root;
    this.meta = meta;
    this.readChunk = readChunk;
    this.cursor = new Cursor(meta, readChunk);
    this.steps = meta.columns.step.length;
    /** @type {number | null} */ this.block = null;         // selected block
    /** @type {number | null} */ this.request = null;       // selected request, null: follow the events
    /** @type {{request: number, position: number} | null} */ this.token = null;
    this.playing = false;
    this.speed = 1;
    this.filter = "";
    this.showOrder = false;
    /** @type {{step: number, first: number, records: any[], rows: import("./model.js").StepRows | null}} */
    this.stepEvents = { step: -2, first: 0, records: [], rows: null };
    /** @type {Map<number, any>} */ this.chips = new Map();  // request -> its elements in the queues
    /** @type {string | null} */ this.layer = null;         // whose write log is shown, null: the latest
    this.darkQuery = matchMedia("(prefers-color-scheme: dark)");
    this.stillQuery = matchMedia("(prefers-reduced-motion: reduce)");
    /** @type {Map<string, string>} */ this.colours = new Map(); // of the theme, by name
    this.arrows = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.goal = -1;       // where to go next; several wishes within a frame become one
    this.busy = false;
    /** @type {Promise<void>} */ this.settled = Promise.resolve();
    this.build();
    this.resize = new ResizeObserver(() => this.draw());
    this.resize.observe(this.main);
    const start = this.steps > 1 ? this.lastEventOf(meta.columns.step[0] < 0 ? 1 : 0) : meta.num_events - 1;
    this.settled = this.goto(start);
  }

  destroy() {
    this.playing = false;
    this.resize.disconnect();
  }

  // ---------------------------------------------------------------- where we are

  /** Place in `columns` of the step an event belongs to. @param {number} event */
  stepIndex(event) {
    return Cursor.chunkOf(this.meta.columns.first_event, event);
  }

  /** @param {number} stepIndex */
  lastEventOf(stepIndex) {
    const first = this.meta.columns.first_event;
    return stepIndex + 1 < first.length ? first[stepIndex + 1] - 1 : this.meta.num_events - 1;
  }

  /** Move to just after an event; resolves once everything shows it. @param {number} event */
  async goto(event) {
    this.goal = Math.max(-1, Math.min(event, this.meta.num_events - 1));
    if (this.busy) return this.settled;
    this.busy = true;
    try {
      let reached;
      do {
        reached = this.goal;
        await this.cursor.goto(reached);
        if (this.stepEvents.step !== this.stepIndex(reached)) {
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
    this.settled = this.goto(this.lastEventOf(Math.max(0, there)));
  }

  /** The records of a step. @param {number} index */
  async loadStep(index) {
    if (this.stepEvents.step === index) return;
    const first = this.meta.columns.first_event[index] ?? 0;
    const records = this.meta.num_events ? await this.cursor.records(first, this.lastEventOf(index)) : [];
    this.stepEvents = { step: index, first, records, rows: await this.cursor.rows(index) };
  }

  /** Records of this step up to the moment shown; none while a drag has not come to rest. */
  past() {
    if (!this.isAtRest()) return [];
    const { records, first } = this.stepEvents;
    return records.slice(0, Math.max(0, this.cursor.event - first + 1));
  }

  async play() {
    this.playing = !this.playing;
    this.playButton.textContent = this.playing ? "pause" : "play";
    this.playButton.setAttribute("aria-label", this.playing ? "pause" : "play");
    while (this.playing && this.cursor.event < this.meta.num_events - 1) {
      const start = performance.now();
      this.moveSteps(1);
      await this.settled;
      await new Promise((next) => setTimeout(next, Math.max(0, 1000 / this.speed - (performance.now() - start))));
    }
    if (this.playing) void this.play();
  }

  // ---------------------------------------------------------------- the page

  build() {
    this.makePlaces();
    const panel = (/** @type {string} */ title, /** @type {string} */ area, /** @type {Node[]} */ ...content) =>
      el("section", { class: `panel ${area}` }, el("h2", {}, title), ...content);
    const name = this.meta.header.model.name ?? "no model";
    this.main = el("div", { class: "viewer", tabindex: -1 },
      el("header", {},
        el("h1", {}, "pagedlab"), el("span", { class: "about" }, show(`${name} · ${this.aboutLine()}`)),
        el("button", { class: "theme", title: "light or dark (t)", "aria-label": "light or dark", onclick: () => this.toggleTheme() }, "◐")),
      this.controls(),
      panel("Tokens per step against the budget, and blocks in use", "time", el("div", { class: "under" }, this.timeline, this.timeHead), this.timeLegend()),
      panel("Requests through time", "lane", el("div", { class: "scroll" }, el("div", { class: "under" }, this.lanes, this.laneHead, this.laneMark)), this.laneLegend()),
      panel("Queues", "queue", this.queues),
      panel("Block pool, in physical order", "grid", this.poolLegend(), this.pool, this.poolNote, this.story),
      panel("Block tables", "table", this.tables),
      panel("Token lens: from token to slot", "token", this.lens),
      panel("What the kernels report", "kernel", this.writes),
      panel("Events of this step", "event", this.filterBox, this.list, this.raw,
        el("p", { class: "note keys" }, "Keys: ← → event · shift + ← → step · home, end · space plays · t light or dark · esc forgets what was chosen · in the lanes and in the pool, arrow keys choose.")),
      this.arrows);
    this.root.append(this.main);
    this.listen();
  }

  /** The places that are filled again and again. */
  makePlaces() {
    this.position = el("output", { class: "position", "aria-live": "polite" });
    this.timeline = el("canvas", { class: "timeline", tabindex: 0, role: "slider", "aria-label": "steps", "aria-valuemin": 0, "aria-valuemax": this.steps - 1 });
    this.timeHead = el("div", { class: "playhead" });
    this.laneHead = el("div", { class: "playhead line" });
    this.laneMark = el("div", { class: "lane-mark" });
    this.lanes = el("canvas", { class: "lanes", tabindex: 0, role: "application", "aria-label": "requests through time; up and down choose one" });
    this.pool = el("canvas", { class: "pool", tabindex: 0, role: "application", "aria-label": "block pool; arrow keys choose a block" });
    this.poolNote = el("p", { class: "note", "aria-live": "polite" });
    this.story = el("div", { class: "story" });
    this.queues = el("div", { class: "queues" });
    this.tables = el("div", { class: "tables" });
    this.lens = el("div", { class: "lens" });
    this.writes = el("div", { class: "writes" });
    this.list = el("div", { class: "events", role: "listbox", tabindex: 0, "aria-label": "events of this step" });
    this.raw = el("pre", { class: "raw" });
    const filter = () => { this.filter = this.filterBox.value.trim(); this.drawEvents(); };
    this.filterBox = el("input", { type: "search", placeholder: "filter: kind, request or block", "aria-label": "filter events", oninput: filter });
    this.arrows.setAttribute("class", "arrows");
    this.arrows.setAttribute("aria-hidden", "true");
  }

  /** The row of buttons that move through time. */
  controls() {
    /** @param {string} label @param {string} title @param {() => void} go */
    const button = (label, title, go) => el("button", { title, "aria-label": title, onclick: go }, label);
    const to = (/** @type {() => number} */ event) => () => { this.settled = this.goto(event()); };
    this.playButton = el("button", { class: "play", "aria-label": "play", title: "play (space)", onclick: () => this.play() }, "play");
    this.speedSelect = el("select", { "aria-label": "steps per second", onchange: () => { this.speed = Number(this.speedSelect.value); } },
      ...SPEEDS.map((s) => el("option", { value: s }, `${s}/s`)));
    return el("nav", { "aria-label": "time" },
      button("|◀", "first step (home)", to(() => this.lastEventOf(0))),
      button("◀\uFE0E◀\uFE0E", "step back (shift + left)", () => this.moveSteps(-1)),
      button("◀\uFE0E", "event back (left)", to(() => this.goal - 1)),
      this.playButton,
      button("▶\uFE0E", "event on (right)", to(() => this.goal + 1)),
      button("▶\uFE0E▶\uFE0E", "step on (shift + right)", () => this.moveSteps(1)),
      button("▶|", "last step (end)", to(() => this.meta.num_events - 1)),
      this.speedSelect, this.position);
  }

  aboutLine() {
    const { model, config } = this.meta.header;
    const parts = [];
    if (model.num_hidden_layers) parts.push(plural(model.num_hidden_layers, "layer"));
    const sizes = [...new Set(this.meta.block_sizes)];
    const each = sizes.length === 1 ? plural(sizes[0], "token") : `${sizes.join(" and ")} tokens`;
    parts.push(`${plural(this.meta.num_blocks - 1, "usable block")} of ${each} (and the null block)`);
    if (config.policy) parts.push(String(config.policy));
    parts.push(`recorded at ${this.meta.header.record}`);
    if (!this.meta.is_complete) parts.push("the trace has no end: it was cut, or still being recorded");
    return parts.join(" · ");
  }

  timeLegend() {
    return el("p", { class: "legend" },
      swatch("prefill", "prompt tokens"), swatch("recomputed", "computed again"), swatch("decode", "decode tokens"),
      el("span", { class: "key" }, `╌ ${this.budgetWords()}`), el("span", { class: "key" }, "━ blocks in use"), el("span", { class: "key" }, "▼ preemption"));
  }

  budgetWords() {
    const { budget, top } = this.timeScale();
    return budget ? `budget of ${budget.toLocaleString("en")}${budget > top ? ", above the picture" : ""}` : "budget";
  }

  laneLegend() {
    return el("p", { class: "legend" }, ...["queued", "prefill", "decode", "recomputed", "preempted", "passed over"].map((k) => swatch(k.replace(" ", "-"), k)));
  }

  poolLegend() {
    this.orderBox = el("input", { type: "checkbox", onchange: () => { this.showOrder = this.orderBox.checked; this.drawPool(); } });
    return el("p", { class: "legend" },
      ...["free", "cached", "in use", "shared", "null"].map((s) => swatch(`block-${s.replace(" ", "-")}`, s)),
      el("label", { class: "key" }, this.orderBox, " order of the free queue"));
  }

  toggleTheme() {
    this.setTheme(this.themeName() === "dark" ? "light" : "dark");
  }

  /** @param {"light" | "dark"} theme */
  setTheme(theme) {
    this.main.dataset.theme = theme;
    this.draw();
  }

  listen() {
    const scrub = (/** @type {PointerEvent} */ e) => {
      const box = this.timeline.getBoundingClientRect();
      const index = Math.floor(((e.clientX - box.left) / box.width) * this.steps);
      this.settled = this.goto(this.lastEventOf(Math.max(0, Math.min(this.steps - 1, index))));
    };
    this.timeline.addEventListener("pointerdown", (/** @type {PointerEvent} */ e) => { this.timeline.setPointerCapture(e.pointerId); scrub(e); });
    this.timeline.addEventListener("pointermove", (/** @type {PointerEvent} */ e) => { if (e.buttons) scrub(e); });
    this.lanes.addEventListener("pointerdown", (/** @type {PointerEvent} */ e) => {
      const box = this.lanes.getBoundingClientRect();
      const request = Math.floor((e.clientY - box.top) / this.laneHeight());
      if (request < this.meta.requests.length) this.chooseRequest(request);
      scrub(e);
    });
    this.pool.addEventListener("pointerdown", (/** @type {PointerEvent} */ e) => {
      const box = this.pool.getBoundingClientRect();
      const { size, columns } = this.poolLayout();
      const block = Math.floor((e.clientY - box.top) / size) * columns + Math.floor((e.clientX - box.left) / size);
      if (block >= 0 && block < this.meta.num_blocks) this.chooseBlock(block);
    });
    this.pool.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => {
      const { columns } = this.poolLayout();
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[e.key];
      if (by === undefined) return;
      e.preventDefault();
      e.stopPropagation();
      this.chooseBlock(Math.max(0, Math.min(this.meta.num_blocks - 1, (this.block ?? 0) + by)));
    });
    this.lanes.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[e.key];
      if (by === undefined) return;
      e.preventDefault();
      const request = this.request === null ? 0 : this.request + by;
      if (request >= 0 && request < this.meta.requests.length && request !== this.request) this.chooseRequest(request);
    });
    this.main.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => this.key(e));
  }

  /** @param {KeyboardEvent} e */
  key(e) {
    const target = /** @type {HTMLElement} */ (e.target);
    if (target.matches("input[type=search], select") || e.ctrlKey || e.metaKey || e.altKey) return;
    const moves = {
      ArrowLeft: () => (e.shiftKey ? this.moveSteps(-1) : void (this.settled = this.goto(this.goal - 1))),
      ArrowRight: () => (e.shiftKey ? this.moveSteps(1) : void (this.settled = this.goto(this.goal + 1))),
      PageUp: () => this.moveSteps(-1),
      PageDown: () => this.moveSteps(1),
      Home: () => void (this.settled = this.goto(this.lastEventOf(0))),
      End: () => void (this.settled = this.goto(this.meta.num_events - 1)),
      t: () => this.toggleTheme(),
      Escape: () => { this.block = this.request = this.token = null; this.draw(); },
    };
    if (e.key === " " && !target.matches("button")) { e.preventDefault(); void this.play(); return; }
    const move = moves[/** @type {keyof typeof moves} */ (e.key)];
    if (move) { e.preventDefault(); move(); }
  }

  /** @param {number} block */
  chooseBlock(block) {
    this.block = block;
    this.drawPool();
    void this.tellStory();
    this.drawTables();
  }

  /** @param {number} request @param {number} position */
  chooseToken(request, position) {
    this.token = { request, position };
    this.drawPool();
    this.drawQueues();
    this.drawTables();
    this.drawLens();
    this.drawWrites();
    this.tables.querySelector(".cell.chosen")?.focus();
  }

  /** @param {number} request */
  chooseRequest(request) {
    this.request = this.request === request ? null : request;
    this.draw();
  }

  // ---------------------------------------------------------------- drawing

  /** The panels that follow from the state alone. */
  drawState() {
    const index = this.stepIndex(this.cursor.event);
    this.sayWhere(index);
    this.drawTimeline(index);
    this.drawLanes(index);
    this.drawPool();
    this.drawQueues();
  }

  draw() {
    this.drawState();
    this.drawTables();
    this.drawLens();
    this.drawWrites();
    this.drawEvents();
    this.host.dispatchEvent(new CustomEvent("moved", { detail: { event: this.cursor.event } }));
  }

  /** @param {number} index */
  sayWhere(index) {
    const record = this.current();
    const step = this.meta.columns.step[index];
    const inStep = this.cursor.event - (this.meta.columns.first_event[index] ?? 0) + 1;
    const where = step < 0 ? "before the first step" : `step ${step}`;
    const count = this.lastEventOf(index) - (this.meta.columns.first_event[index] ?? 0) + 1;
    this.position.textContent = show(`${where} · event ${inStep} of ${count}${record ? `: ${record.kind}${record.request_id ? ` ${record.request_id}` : ""}` : ""}`);
    this.timeline.setAttribute("aria-valuenow", String(index));
    this.timeline.setAttribute("aria-valuetext", where);
  }

  current() {
    return this.stepEvents.records.find((r) => r.index === this.cursor.event);
  }

  /** A canvas at the screen's resolution. @param {HTMLCanvasElement} canvas @param {number} height */
  context(canvas, height) {
    const width = canvas.parentElement?.clientWidth || 600;
    const scale = devicePixelRatio || 1;
    const key = `${width} ${height} ${scale} ${this.themeName()}`;
    const isFresh = canvas.dataset.drawn !== key; // else what was drawn still stands
    if (isFresh) {
      canvas.dataset.drawn = key;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
      this.colours = new Map();
    }
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(scale, 0, 0, scale, 0, 0);
    return { context, width, isFresh, colour: (/** @type {string} */ name) => this.colour(name) };
  }

  themeName() {
    return this.main.dataset.theme ?? (this.darkQuery.matches ? "dark" : "light");
  }

  /** A colour of the theme, looked up once. @param {string} name @returns {string} */
  colour(name) {
    let value = this.colours.get(name);
    if (value === undefined) {
      value = getComputedStyle(this.main).getPropertyValue(`--${name}`).trim();
      this.colours.set(name, value);
    }
    return value;
  }

  /** @param {HTMLElement} head @param {number} index */
  movePlayhead(head, index) {
    const width = 100 / this.steps;
    head.style.left = `${index * width}%`;
    head.style.width = `max(${width}%, 2px)`;
  }

  /** The token budget (0 if it is not known), and the number of tokens that the timeline is high. */
  timeScale() {
    const c = this.meta.columns;
    const most = Math.max(1, ...[...Array(this.steps).keys()].map((i) => c.prefill[i] + c.recomputed[i] + c.decode[i]));
    const budget = Math.max(0, ...c.budget);
    return { budget, top: Math.min(budget || most, most * 1.25) };
  }

  /** @param {number} index */
  drawTimeline(index) {
    this.movePlayhead(this.timeHead, index);
    const height = 110;
    const { context, width, colour, isFresh } = this.context(this.timeline, height);
    if (!isFresh) return;
    const c = this.meta.columns;
    const { budget, top } = this.timeScale();
    const bar = width / this.steps;
    const y = (/** @type {number} */ tokens) => height - 4 - (tokens / top) * (height - 22);
    for (let i = 0; i < this.steps; i += 1) {
      let tokens = 0;
      for (const kind of ["decode", "recomputed", "prefill"]) {
        if (!c[kind][i]) continue;
        context.fillStyle = colour(kind);
        const from = y(tokens), to = y(tokens + c[kind][i]);
        context.fillRect(i * bar, to, Math.max(bar - (bar > 4 ? 1 : 0), 0.5), from - to);
        if (kind !== "decode" && bar > 5) hatch(context, i * bar, to, bar - 1, from - to, colour("paper"));
        tokens += c[kind][i];
      }
      if (c.preempted[i]) {
        context.fillStyle = colour("alert");
        context.beginPath();
        context.moveTo(i * bar + bar / 2 - 4, 2);
        context.lineTo(i * bar + bar / 2 + 4, 2);
        context.lineTo(i * bar + bar / 2, 9);
        context.fill();
      }
    }
    context.strokeStyle = colour("ink");
    context.lineWidth = 1.5;
    context.beginPath();
    for (let i = 0; i < this.steps; i += 1) {
      const level = height - 4 - (c.used[i] / Math.max(1, this.meta.num_blocks - 1)) * (height - 22);
      context.lineTo(i * bar, level);
      context.lineTo((i + 1) * bar, level);
    }
    context.stroke();
    if (budget && budget <= top) {
      context.setLineDash([4, 4]);
      context.strokeStyle = colour("dim");
      context.beginPath();
      context.moveTo(0, y(budget));
      context.lineTo(width, y(budget));
      context.stroke();
      context.setLineDash([]);
    }
  }

  laneHeight() {
    return this.meta.requests.length > 40 ? 8 : 18;
  }

  /** @param {number} index */
  drawLanes(index) {
    const lane = this.laneHeight();
    this.movePlayhead(this.laneHead, index);
    this.laneMark.hidden = this.request === null;
    this.laneMark.style.top = `${(this.request ?? 0) * lane}px`;
    this.laneMark.style.height = `${lane}px`;
    const { context, width, colour, isFresh } = this.context(this.lanes, Math.max(lane, this.meta.requests.length * lane));
    if (!isFresh) return;
    const bar = width / this.steps;
    const first = this.meta.columns.step[0];
    for (const [request, kind, from, to] of this.meta.segments) {
      const x = (from - first) * bar, y = request * lane + 1, w = Math.max((to - from + 1) * bar - 0.5, 0.5);
      const name = KINDS_OF_WORK[kind];
      context.fillStyle = colour(name.replace(" ", "-"));
      const thin = kind >= 3 ? lane / 3 : 0; // not running: a thin line
      context.fillRect(x, y + thin, w, lane - 2 - 2 * thin);
      if (kind <= 1 && lane > 10) hatch(context, x, y, w, lane - 2, colour("paper"));
    }
    if (lane > 10) {
      context.font = "11px system-ui, sans-serif";
      this.meta.requests.forEach((/** @type {any} */ r, /** @type {number} */ i) => {
        const start = this.meta.segments.find((/** @type {number[]} */ s) => s[0] === i);
        const x = start ? Math.max(2, Math.min((start[2] - first) * bar + 3, width - 60)) : 2;
        context.strokeStyle = colour("paper");
        context.lineWidth = 3;
        context.strokeText(show(r.id), x, i * lane + lane - 5);
        context.fillStyle = colour("ink");
        context.fillText(show(r.id), x, i * lane + lane - 5);
      });
    }
  }

  /** Why each request did or did not move in this step, from the scheduler's own words. */
  reasons() {
    /** @type {Map<string, string>} */ const said = new Map();
    /** @type {Record<string, any>} */ const rest = {};
    for (const r of this.past()) {
      if (r.kind === "request_considered") {
        const why = this.meta.reasons[r.reason] ?? r.reason;
        const numbers = r.num_needed_blocks != null ? ` (needs ${r.num_needed_blocks}, ${r.num_free_blocks} free)` : "";
        const verb = r.outcome === "scheduled" ? `${r.num_tokens_granted} of ${plural(r.num_tokens_wanted, "token")}` : r.outcome;
        said.set(r.request_id, r.reason === "all_tokens" ? verb : `${verb}: ${why}${numbers}`);
      } else if (r.kind === "request_preempted") {
        said.set(r.request_id, `preempted for ${r.on_behalf_of}: ${r.rule}`);
      } else if (r.kind === "queue_not_reached") {
        rest[r.queue] = `not looked at: ${this.meta.reasons[r.reason] ?? r.reason}`;
      }
    }
    return { said, rest };
  }

  /** Which queue each request stood in when this step began, from the records: request id -> queue. */
  cameFrom() {
    /** @type {Map<string, string>} */ const from = new Map();
    for (const r of this.past()) {
      if (r.kind === "request_added") from.set(r.request_id, "new");
      if (r.kind === "request_considered" && r.outcome === "scheduled" && r.queue === "waiting") from.set(r.request_id, "waiting");
      if (r.kind === "request_preempted") from.set(r.request_id, "running");
    }
    return from;
  }

  drawQueues() {
    const { state } = this.cursor;
    const { said, rest } = this.reasons();
    const from = this.cameFrom();
    const before = this.chipPlaces();
    const column = (/** @type {string} */ name, /** @type {number[]} */ queue) => {
      const items = queue.slice(0, MOST_CHIPS).map((request) => {
        const { id } = this.meta.requests[request];
        const origin = from.get(id);
        const came = origin === "new" ? "just arrived" : origin && origin !== name ? `from ${origin}` : "";
        return this.chip(request, [came, said.get(id) ?? rest[name] ?? ""].filter(Boolean).join(": "));
      });
      const chosen = this.request !== null && queue.indexOf(this.request) >= MOST_CHIPS ? `, ${this.meta.requests[this.request].id} among them` : "";
      if (queue.length > MOST_CHIPS) items.push(el("li", {}, show(`… ${queue.length - MOST_CHIPS} more${chosen}`)));
      return el("div", { class: "column", "data-queue": name }, el("h3", {}, `${name} (${queue.length})`), el("ol", {}, ...items));
    };
    this.queues.replaceChildren(column("waiting", state.waiting), column("running", state.running), this.leftColumn());
    this.slideChips(before);
  }

  /** A request in a queue, with the reason why it is there; made once, then only brought up to date.
   * @param {number} request @param {string} note */
  chip(request, note) {
    const { id } = this.meta.requests[request], r = this.cursor.state.request(request);
    let chip = this.chips.get(request);
    if (!chip) {
      const meter = el("meter", { min: 0 }), count = el("span", { class: "count" }), mark = el("i", {}, "preempted"), why = el("small", {});
      const button = el("button", { class: "chip", style: `--owner:${hue(request)}`, onclick: () => this.chooseRequest(request), "data-request": id }, el("b", {}, show(id)), meter, count, mark);
      chip = { item: el("li", {}, button, why), button, meter, count, mark, why };
      this.chips.set(request, chip);
    }
    const numbers = `${r.computed}/${r.known}`, text = show(note), isChosen = this.request === request;
    if (chip.count.textContent !== numbers) {
      chip.count.textContent = numbers;
      chip.meter.max = Math.max(r.known, 1);
      chip.meter.value = r.computed;
      chip.meter.title = `${r.computed} of ${r.known} known tokens computed`;
    }
    if (chip.why.textContent !== text) chip.why.textContent = text;
    chip.mark.hidden = r.status !== 2;
    chip.button.classList.toggle("chosen", isChosen);
    chip.button.classList.toggle("lit", this.token?.request === request);
    chip.button.setAttribute("aria-pressed", String(isChosen));
    return chip.item;
  }

  /** Requests that left in this step, so that nobody vanishes without a word. */
  leftColumn() {
    const gone = this.past().filter((r) => r.kind === "request_finished" || r.kind === "request_refused");
    if (!gone.length) return "";
    const items = gone.slice(0, MOST_CHIPS).map((r) => el("li", {}, show(`${r.request_id}: ${r.finish_reason ?? "refused at the door"}`)));
    return el("div", { class: "column left", "data-queue": "left" }, el("h3", {}, `left in this step (${gone.length})`), el("ol", {}, ...items));
  }

  /** Where each request's chip stands on the screen: request id -> box. */
  chipPlaces() {
    /** @type {Map<string, DOMRect>} */ const places = new Map();
    if (this.meta.requests.length > 2 * MOST_CHIPS || !this.isAtRest() || this.stillQuery.matches) return places;
    for (const chip of this.queues.querySelectorAll(".chip")) places.set(chip.dataset.request, chip.getBoundingClientRect());
    return places;
  }

  /** Let a chip that changed its place slide there. @param {Map<string, DOMRect>} before */
  slideChips(before) {
    if (!before.size) return;
    for (const chip of this.queues.querySelectorAll(".chip")) {
      const old = before.get(chip.dataset.request);
      if (!old) continue;
      const now = chip.getBoundingClientRect();
      const dx = old.left - now.left, dy = old.top - now.top;
      if (dx || dy) chip.animate([{ transform: `translate(${dx}px, ${dy}px)`, zIndex: 1 }, { transform: "none" }], { duration: 350, easing: "ease-in-out" });
    }
  }

  /** Whether the records of the step shown are here: they are read when a drag comes to rest. */
  isAtRest() {
    return this.stepEvents.step === this.stepIndex(this.cursor.event);
  }

  poolLayout() {
    const width = this.pool.parentElement?.clientWidth || 600;
    const n = this.meta.num_blocks;
    const fit = Math.sqrt((width * 380) / n);
    const size = Math.max(4, Math.min(38, Math.floor(fit)));
    const columns = Math.max(1, Math.floor(width / size));
    return { size, columns, height: Math.ceil(n / columns) * size };
  }

  drawPool() {
    const { size, columns, height } = this.poolLayout();
    const { context, isFresh } = this.context(this.pool, height);
    const { state } = this.cursor;
    const owners = state.owners();
    const order = new Int32Array(this.showOrder ? state.numBlocks : 0);
    if (this.showOrder) state.freeQueue().forEach((block, place) => { order[block] = place + 1; });
    const shown = this.shownRequest();
    const mine = new Set(shown === null ? [] : (state.requests.get(shown)?.tables ?? []).flat());
    const read = this.readBlocks(), lit = new Set(this.litBlocks());
    if (isFresh || !this.cells) this.cells = new Float64Array(state.numBlocks).fill(-1); // what each cell shows now
    const counts = { null: 0, free: 0, cached: 0, "in use": 0, shared: 0 };
    const names = /** @type {(keyof typeof counts)[]} */ (Object.keys(counts));
    for (let block = 0; block < state.numBlocks; block += 1) {
      const refs = state.refs[block];
      const is = block === 0 ? 0 : refs > 1 ? 4 : refs ? 3 : state.hashed[block] ? 2 : 1;
      counts[names[is]] += 1;
      const place = this.showOrder ? order[block] : 0;
      const marks = (mine.has(block) ? 1 : 0) + (read.has(block) ? 2 : 0) + (block === this.block ? 4 : 0) + (lit.has(block) ? 8 : 0);
      const key = (((owners[block] + 1) * (state.numBlocks + 1) + place) * 64 + Math.min(refs, 63)) * 128 + marks * 8 + is;
      if (this.cells[block] === key) continue;
      this.cells[block] = key;
      const x = (block % columns) * size, y = Math.floor(block / columns) * size;
      this.drawCell(context, x, y, size, { block, is, refs, place, marks, owner: owners[block], numFree: state.numFree });
    }
    const front = state.freeQueue(8).join(", ");
    this.poolNote.textContent = `${counts["in use"]} in use, ${counts.shared} shared, ${counts.cached} cached and free, ${counts.free} free, 1 null. Next to be handed out: ${front || "none"}.`;
  }

  /** One block of the pool: its state by colour and by pattern, so that either is enough.
   * @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} size
   * @param {{block: number, is: number, refs: number, place: number, marks: number, owner: number, numFree: number}} cell */
  drawCell(context, x, y, size, { block, is, refs, place, marks, owner, numFree }) {
    const s = size - (size > 8 ? 2 : 1);
    context.fillStyle = this.colour("paper");
    context.fillRect(x, y, size, size);
    context.fillStyle = is === 0 ? this.colour("dim") : is === 1 ? this.colour("empty") : is === 2 ? this.colour("cached") : hue(owner);
    context.fillRect(x, y, s, s);
    const outline = (/** @type {string} */ colour, /** @type {number} */ width, /** @type {number} */ inset) => {
      context.strokeStyle = colour;
      context.lineWidth = width;
      context.strokeRect(x + inset, y + inset, s - 2 * inset, s - 2 * inset);
    };
    if (is === 2 && size > 6) hatch(context, x, y, s, s, this.colour("paper"));
    if (is === 1 && size > 5) outline(this.colour("line"), 1, 0.5);
    if (is === 4 && size > 5) outline(this.colour("ink"), size > 12 ? 2.5 : 1, 1);
    if (place) {
      context.fillStyle = `rgba(128,128,128,${0.75 - 0.7 * (place / Math.max(1, numFree))})`;
      context.fillRect(x, y, s, s);
    }
    if (size >= 18) {
      context.fillStyle = is >= 3 ? inkOn(hue(owner)) : this.colour(is === 0 ? "paper" : "ink");
      context.font = `${Math.min(13, size * 0.36)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(place ? `${place}.` : is === 0 ? "∅" : is === 4 ? `${block}×${refs}` : String(block), x + s / 2, y + s / 2);
    }
    if (marks & 1 && block) outline(this.colour("accent"), size > 12 ? 2 : 1, 0.5);
    if (marks & 2) {
      context.fillStyle = this.colour("accent");
      context.fillRect(x, y + s - Math.max(2, s / 6), s, Math.max(2, s / 6));
    }
    if (marks & 8) { // the chosen token's block
      outline(this.colour("paper"), 1, 2.5);
      outline(this.colour("ink"), 3, 1);
    }
    if (marks & 4) outline(this.colour("alert"), 2.5, 1);
  }

  /** The blocks that hold the chosen token, one per KV-cache group. */
  litBlocks() {
    if (!this.token) return [];
    const { request, position } = this.token;
    const tables = this.cursor.state.requests.get(request)?.tables ?? [];
    return tables.map((table, group) => table[Math.floor(position / this.meta.block_sizes[group])]).filter((block) => block);
  }

  /** Blocks that the attention kernel reported to have read, for the request shown. */
  readBlocks() {
    const shown = this.shownRequest();
    const id = shown === null ? null : this.meta.requests[shown].id;
    const reads = this.past().filter((r) => r.kind === "kv_read" && r.request_id === id);
    return new Set(reads.length ? reads[reads.length - 1].block_ids : []);
  }

  /** The life of the chosen block, event by event. */
  async tellStory() {
    const block = this.block;
    if (block === null) { this.story.replaceChildren(); return; }
    if (!this.blockEvents) this.blockEvents = varints(await inflate(this.readChunk("block_events")));
    const mine = [];
    for (let i = 0, at = 0; i < this.blockEvents.length; i += 2) {
      at += this.blockEvents[i];
      if (this.blockEvents[i + 1] === block) mine.push(at);
    }
    const shown = mine.slice(-60);
    const records = [];
    for (const index of shown) records.push(...(await this.cursor.records(index, index)));
    if (this.block !== block) return;
    const { state } = this.cursor;
    const items = records.map((r) => el("li", { class: r.index <= this.cursor.event ? "past" : "future" },
      el("button", { onclick: () => { this.settled = this.goto(r.index); } }, show(`step ${r.step}: ${lifeOf(r)}`))));
    this.story.replaceChildren(
      el("h3", {}, block === 0 ? "Block 0 is the null block: a placeholder that is never handed out" : `Block ${block}: ${state.stateOf(block)}, ${state.refs[block]} owners${state.hashed[block] ? `, hash ${state.hashes[block].toString(16).padStart(8, "0")}` : ""}`),
      el("ol", { class: "life" }, ...(mine.length > shown.length ? [el("li", {}, `… ${mine.length - shown.length} earlier events`)] : []), ...items));
  }

  /** The request whose tables are shown: the chosen one, else the one the event is about, else the first running. */
  shownRequest() {
    const { state } = this.cursor;
    if (this.request !== null) return state.requests.has(this.request) ? this.request : null;
    const id = this.current()?.request_id;
    const index = id === undefined ? -1 : this.meta.requests.findIndex((/** @type {any} */ r) => r.id === id);
    if (index >= 0 && state.requests.has(index)) return index;
    return state.running[0] ?? state.waiting[0] ?? null;
  }

  drawTables() {
    const { state } = this.cursor;
    const chosen = this.shownRequest();
    const alone = this.request !== null || this.meta.requests.length > MANY_REQUESTS;
    const others = alone ? [] : state.running.filter((r) => r !== chosen).slice(0, 3);
    const requests = chosen === null ? [] : [chosen, ...others];
    this.tables.replaceChildren(...requests.map((request) => this.tableOf(request)));
    if (!requests.length) this.tables.append(el("p", { class: "note" }, "No request holds blocks at this moment."));
    requestAnimationFrame(() => this.drawArrows());
  }

  /** A request and its block tables, one per KV-cache group. @param {number} request */
  tableOf(request) {
    const info = this.meta.requests[request], r = this.cursor.state.request(request);
    const scheduled = this.past().find((e) => e.kind === "step_scheduled")?.num_scheduled_tokens[info.id] ?? 0;
    const now = scheduled ? `, ${scheduled} of them in this step` : "";
    const groups = r.tables.map((_, group) => this.groupOf(request, group, r.computed - scheduled));
    return el("div", { class: "request", "data-request": info.id },
      el("h3", { style: `--owner:${hue(request)}` }, show(info.id), el("small", {}, ` ${STATUSES[r.status]}, ${r.computed} of ${plural(r.known, "token")} computed${now}`)),
      el("div", { class: "groups" }, ...groups));
  }

  /** One table, or the part of it around the first token of this step.
   * @param {number} request @param {number} group @param {number} from position of that token */
  groupOf(request, group, from) {
    const table = this.cursor.state.request(request).tables[group];
    const size = this.meta.block_sizes[group];
    const isCut = table.length > MOST_BLOCKS;
    const start = isCut ? Math.max(0, Math.min(table.length - MOST_BLOCKS, Math.floor(from / size) - 4)) : 0;
    const blocks = table.slice(start, start + MOST_BLOCKS).map((block, i) => this.blockOf(request, group, start + i, block, from));
    const notes = [];
    if (this.meta.block_sizes.length > 1) notes.push(`${this.groupName(group)}, blocks of ${size}`);
    if (isCut) notes.push(`blocks ${start} to ${start + MOST_BLOCKS - 1} of ${table.length}`);
    return el("div", { class: "group" }, ...(notes.length ? [el("small", {}, notes.join(", "))] : []), el("div", { class: "blocks" }, ...blocks));
  }

  /** @param {number} group */
  groupName(group) {
    const { kind, window } = this.meta.groups[group] ?? {};
    const about = [kind?.replace("_", " "), window && `window ${window}`].filter(Boolean).join(", ");
    return `group ${group}${about ? ` (${about})` : ""}`;
  }

  /** A logical block with the tokens in it.
   * @param {number} request @param {number} group @param {number} logical @param {number} block 0: left the window
   * @param {number} from */
  blockOf(request, group, logical, block, from) {
    const size = this.meta.block_sizes[group];
    const cells = Array.from({ length: Math.min(size, MOST_CELLS) }, (_, offset) => this.cellOf(request, logical * size + offset, block, size, from));
    if (size > MOST_CELLS) cells.push(el("span", { class: "note" }, `… ${size - MOST_CELLS} more`));
    return el("div", { class: `block${block === this.block ? " chosen" : ""}`, "data-block": block },
      el("button", { class: "head", title: block ? `block ${block}: its life` : "the null block: this part left the window", onclick: () => this.chooseBlock(block) }, `${logical} → ${block || "∅"}`),
      el("div", { class: "cells" }, ...cells));
  }

  /** One place for a token: computed earlier, in this step, known but not computed, or empty.
   * @param {number} request @param {number} position @param {number} block @param {number} size @param {number} from */
  cellOf(request, position, block, size, from) {
    const r = this.cursor.state.request(request);
    const isKnown = position < r.known;
    const status = position >= r.computed ? (isKnown ? "known" : "empty") : position >= from ? "now" : "done";
    const isChosen = this.token?.request === request && this.token.position === position;
    const where = block ? `slot ${block * size + (position % size)}` : "out of the window";
    return el("button", {
      class: `cell ${status}${block ? "" : " gone"}${isChosen ? " chosen" : ""}`, disabled: !isKnown, "data-position": position,
      title: `position ${position}, offset ${position % size}, ${where}, ${STATUS_WORDS[status]}`, onclick: () => this.chooseToken(request, position),
    }, isKnown ? this.textAt(request, position) || "·" : "·");
  }

  /** @param {number} request @param {number} position */
  textAt(request, position) {
    const token = this.meta.requests[request].tokens[position];
    const text = this.meta.token_texts[token];
    return show(text === undefined ? `#${token}` : text);
  }

  /** From blocks of the first table, and from the chosen token, to their cells in the pool. */
  drawArrows() {
    this.arrows.replaceChildren();
    if (this.pool.clientWidth === 0 || this.main.clientWidth < 640) return;
    for (const group of this.tables.querySelectorAll(".group")) {
      const cell = group.querySelector(".cell.chosen");
      if (cell) this.arrowToPool(cell, Number(cell.closest(".block").dataset.block), "lit");
    }
    const heads = [...this.tables.querySelectorAll(".request:first-child .block")];
    if (heads.length > 10 && this.block === null) return; // too many to follow; choosing a block shows its own
    for (const head of heads) {
      const block = Number(head.dataset.block);
      if (this.block === null || block === this.block) this.arrowToPool(head, block, "");
    }
  }

  /** @param {HTMLElement} from @param {number} block @param {string} style */
  arrowToPool(from, block, style) {
    if (!block) return;
    const { size, columns } = this.poolLayout();
    const base = this.main.getBoundingClientRect(), pool = this.pool.getBoundingClientRect(), box = from.getBoundingClientRect();
    const x1 = box.left - base.left + Math.min(box.width / 2, 40), y1 = box.top - base.top;
    const x2 = pool.left - base.left + (block % columns) * size + size / 2;
    const y2 = pool.top - base.top + Math.floor(block / columns) * size + size / 2;
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M ${x1} ${y1} C ${x1} ${y1 - 40}, ${x2} ${y2 + 60}, ${x2} ${y2}`);
    path.setAttribute("class", style);
    path.dataset.block = String(block);
    this.arrows.append(path);
  }

  drawLens() {
    const chosen = this.token ?? this.lastToken();
    if (!chosen || !this.cursor.state.requests.has(chosen.request)) {
      this.lens.replaceChildren(el("p", { class: "note" }, "Pick a token in a block table to follow it to its slot."));
      return;
    }
    const { request, position } = chosen;
    const tables = this.cursor.state.request(request).tables;
    this.lens.replaceChildren(...tables.map((_, group) => el("div", { class: "chain", "data-group": group },
      ...(tables.length > 1 ? [el("h3", {}, `group ${group}`)] : []),
      ...this.chains(request, position, group))));
  }

  /** The way from a token to its slot: as recorded, and as the other index design would go.
   * @param {number} request @param {number} position @param {number} group */
  chains(request, position, group) {
    const recorded = this.recordedPlace(request, position, group);
    const derived = Object.keys(DESIGNS).filter((d) => d !== recorded?.design).map((d) => this.derivedPlace(/** @type {keyof typeof DESIGNS} */ (d), request, position, group));
    const places = [recorded, ...derived].filter((p) => p !== null);
    if (!places.length) {
      const isDone = position < this.cursor.state.request(request).computed;
      const why = isDone ? "Written in an earlier step; the chain follows from the table as it stands." : "Not scheduled yet at this moment.";
      return [this.chain(null, request, position, group), el("p", { class: "note" }, why)];
    }
    return places.flatMap((place) => {
      const how = place === recorded ? "as this run recorded it" : "derived from the same messages by that design's rules; same block, same slot";
      return [el("p", { class: "note design" }, `${DESIGNS[place.design]}, ${how}`), this.chain(place, request, position, group)];
    });
  }

  /** @param {number} request @param {number} position @param {number} group */
  recordedPlace(request, position, group) {
    const { id } = this.meta.requests[request];
    const past = this.past();
    const map = past.find((e) => e.kind === "slots_mapped" && e.group === group);
    const ordered = past.filter((e) => e.kind === "batch_ordered").pop();
    const at = map ? map.request_id.findIndex((/** @type {string} */ other, /** @type {number} */ i) => other === id && map.position[i] === position) : -1;
    if (at < 0) return null;
    const design = /** @type {keyof typeof DESIGNS} */ (ordered?.idx_mapping ? "state-table" : "persistent");
    const batchRow = ordered ? ordered.request_ids.indexOf(id) : map.row[at];
    return { design, flat: map.token[at], batchRow, stateRow: ordered?.idx_mapping ? ordered.idx_mapping[batchRow] : map.row[at], tableIndex: map.table_index[at], width: map.table_stride };
  }

  /** @param {keyof typeof DESIGNS} design @param {number} request @param {number} position @param {number} group */
  derivedPlace(design, request, position, group) {
    const { rows } = this.stepEvents;
    const r = this.cursor.state.request(request);
    if (!rows || !this.past().some((e) => e.kind === "step_scheduled")) return null;
    const granted = rows.tokens[rows.requests.indexOf(request)] ?? 0;
    const place = placeInBatch(rows, design, request, position, r.computed - granted);
    if (!place) return null;
    const width = this.meta.table_widths[group];
    const logical = Math.floor(position / this.meta.block_sizes[group]);
    return { design, ...place, width, tableIndex: width === null ? null : place.batchRow * width + logical };
  }

  /** @param {NonNullable<ReturnType<Viewer["recordedPlace"]>> | NonNullable<ReturnType<Viewer["derivedPlace"]>> | null} place
   * @param {number} request @param {number} position @param {number} group */
  chain(place, request, position, group) {
    const size = this.meta.block_sizes[group];
    const logical = Math.floor(position / size), offset = position % size;
    const block = this.cursor.state.request(request).tables[group][logical];
    const links = [link("token", this.textAt(request, position), `id ${this.meta.requests[request].tokens[position]}`)];
    if (place) {
      links.push(link("flat index", place.flat, "place in this step's batch"), link("batch row", place.batchRow, "batch_idx"));
      links.push(link("state row", place.stateRow, place.design === "state-table" ? "idx_mapping[batch row]" : "the same in the persistent batch"));
    }
    links.push(link("position", position, "in its own request"), link("logical block", logical, `${position} // ${size}`), link("offset", offset, `${position} % ${size}`));
    if (place) {
      const index = (/** @type {number} */ row) => (place.width === null ? "–" : row * place.width + logical);
      const sum = (/** @type {number} */ row) => `row ${row} · K ${place.width ?? ""} + ${logical}`;
      if (place.design === "state-table") links.push(link("gathered from", index(place.stateRow), sum(place.stateRow)));
      links.push(link("table index", place.tableIndex ?? "–", sum(place.batchRow)));
    }
    if (block === undefined) links.push(link("block", "none yet", "allocated when the token is scheduled"));
    else if (block === 0) links.push(link("block", "∅", "left the window"));
    else links.push(link("block", block, "read from the table there"), link("slot", block * size + offset, `${block} · ${size} + ${offset}`), link("in the cache", `[0, ${block}, ${offset}]`, this.address(group, block, offset)));
    return el("div", { class: "links", "data-design": place?.design ?? "" }, ...links.flatMap((l, i) => (i ? [el("span", { class: "to", "aria-hidden": "true" }, "→"), l] : [l])));
  }

  /** The last token of this step's batch, so that the lens is never empty while something runs; where the batch
   * was not recorded, the last one of the request shown. */
  lastToken() {
    const map = this.past().filter((e) => e.kind === "slots_mapped").pop();
    if (map?.token.length) {
      const i = map.token.length - 1;
      const request = this.meta.requests.findIndex((/** @type {any} */ r) => r.id === map.request_id[i]);
      return { request, position: map.position[i] };
    }
    const request = this.shownRequest();
    const r = request === null ? undefined : this.cursor.state.requests.get(request);
    return request === null || !r?.computed ? null : { request, position: r.computed - 1 };
  }

  /** Byte offsets of a slot in one layer's buffer. Most backends lay it out as [2, blocks, block_size, kv_heads, head_dim];
   * torch, like vLLM's CPU backend, as [2, blocks, kv_heads, block_size, head_dim].
   * @param {number} group @param {number} block @param {number} offset */
  address(group, block, offset) {
    const { model, config } = this.meta.header;
    const width = { float32: 4, bfloat16: 2, float16: 2 }[/** @type {string} */ (config.dtype)];
    if (!width || !model.head_dim) return "keys; [1, …] is the value";
    const size = this.meta.block_sizes[group], heads = Number(model.num_key_value_heads);
    const head = Number(model.head_dim) * width;
    const isHeadsFirst = config.attention_backend === "torch" && heads > 1;
    const key = isHeadsFirst ? (block * heads * size + offset) * head : (block * size + offset) * heads * head;
    const value = key + this.meta.num_blocks * size * heads * head;
    const where = `key at byte ${key.toLocaleString("en")}, value at ${value.toLocaleString("en")}`;
    return isHeadsFirst ? `head 0: ${where}; each further head ${(size * head).toLocaleString("en")} bytes on` : where;
  }

  drawWrites() {
    const written = this.past().filter((e) => e.kind === "kv_written");
    if (!written.length) {
      this.writes.replaceChildren(el("p", { class: "note" }, this.meta.header.record === "kernels" ? "Nothing has been written in this step yet." : `Recorded at ${this.meta.header.record}; the write log needs --record kernels.`));
      return;
    }
    const log = written.find((e) => e.layer === this.layer) ?? written[written.length - 1];
    const select = el("select", { "aria-label": "layer", onchange: () => { this.layer = select.value; this.drawWrites(); } },
      ...written.map((e) => el("option", { value: e.layer, selected: e === log }, show(e.layer))));
    this.writes.replaceChildren(
      el("label", { class: "note" }, "layer ", select),
      el("p", { class: "note" }, show(`Written by ${log.source}: ${plural(log.slot.length, "slot")}. A cell shows the beginning of its checksum; · was not written in this step.`)),
      this.writtenBlocks(log), ...this.readsOf(log));
  }

  /** The cells of the cache that a write log fills. @param {any} log */
  writtenBlocks(log) {
    /** @type {Map<number, Map<number, number>>} */ const blocks = new Map();
    log.block_id.forEach((/** @type {number} */ block, /** @type {number} */ i) => {
      if (!blocks.has(block)) blocks.set(block, new Map());
      blocks.get(block)?.set(log.offset[i], i);
    });
    const size = this.meta.block_sizes[log.group];
    const lit = this.token && this.recordedPlace(this.token.request, this.token.position, log.group)?.flat;
    const cell = (/** @type {number | undefined} */ i) => i === undefined
      ? el("span", { class: "cell done", title: "not written in this step" }, "·")
      : el("span", { class: `cell now${log.token[i] === lit ? " chosen" : ""}`, title: `token ${log.token[i]} → slot ${log.slot[i]}, checksum ${log.checksum[i].toString(16)}` }, log.checksum[i].toString(16).slice(0, 4));
    const drawn = [...blocks].slice(0, 32).map(([block, offsets]) => el("div", { class: "block" },
      el("button", { class: "head", onclick: () => this.chooseBlock(block) }, `block ${block}`),
      el("div", { class: "cells" }, ...Array.from({ length: size }, (_, offset) => cell(offsets.get(offset))))));
    if (blocks.size > drawn.length) drawn.push(el("p", { class: "note" }, `… ${plural(blocks.size - drawn.length, "more block")}`));
    return el("div", { class: "blocks" }, ...drawn);
  }

  /** What the attention kernel read for the chosen query token, and which of it counts for that token. @param {any} log */
  readsOf(log) {
    const chosen = this.token ?? this.lastToken();
    if (!chosen) return [];
    const { id } = this.meta.requests[chosen.request];
    const read = this.past().find((e) => e.kind === "kv_read" && e.layer === log.layer && e.request_id === id);
    const r = this.cursor.state.requests.get(chosen.request);
    if (!read || !r) return [el("p", { class: "note" }, show(`The attention of ${log.layer} has not read anything for ${id} in this step yet.`))];
    const isQuery = this.recordedPlace(chosen.request, chosen.position, log.group) !== null;
    const window = this.meta.groups[log.group]?.window ?? Infinity;
    const size = this.meta.block_sizes[log.group], table = r.tables[log.group];
    const cell = (/** @type {number} */ position) => {
      const isSeen = position <= chosen.position && position > chosen.position - window;
      const title = `position ${position}: ${isSeen ? "this query sees it" : "masked"}`;
      return el("span", { class: `cell ${isSeen ? "seen" : "masked"}`, title }, position < r.known ? this.textAt(chosen.request, position) : "·");
    };
    const drawn = read.block_ids.slice(0, 32).map((/** @type {number} */ block) => {
      const first = table.indexOf(block) * size;
      return el("div", { class: "block read", "data-block": block },
        el("button", { class: "head", onclick: () => this.chooseBlock(block) }, `block ${block}`),
        el("div", { class: "cells" }, ...Array.from({ length: size }, (_, offset) => cell(first + offset))));
    });
    const query = isQuery ? `The query at position ${chosen.position} of ${id}` : `No query at position ${chosen.position} of ${id} ran in this step; one there`;
    return [
      el("p", { class: "note" }, show(`${query} sees the framed keys. Read by ${read.source} for the queries of ${id}: block${read.block_ids.length === 1 ? "" : "s"} ${read.block_ids.join(", ")}.`)),
      el("div", { class: "blocks" }, ...drawn)];
  }

  drawEvents() {
    const words = this.filter.toLowerCase();
    const all = this.stepEvents.records;
    const matching = words ? all.filter((r) => matches(r, words)) : all;
    const at = Math.max(0, matching.findIndex((r) => r.index >= this.cursor.event));
    const from = Math.max(0, Math.min(at - 30, matching.length - 60));
    const items = matching.slice(from, from + 60).map((r) => el("button", {
      class: `row${r.index === this.cursor.event ? " here" : r.index > this.cursor.event ? " future" : ""}`,
      role: "option", "aria-selected": r.index === this.cursor.event, "data-index": r.index,
      onclick: () => { this.settled = this.goto(r.index); },
    }, el("code", {}, r.kind), show(` ${summary(r)}`)));
    if (from > 0) items.unshift(el("p", { class: "note" }, `… ${from} before`));
    if (matching.length > from + 60) items.push(el("p", { class: "note" }, `… ${matching.length - from - 60} more`));
    if (!items.length) items.push(el("p", { class: "note" }, words ? "No event of this step matches." : "No events."));
    this.list.replaceChildren(...items);
    const here = this.list.querySelector(".here");
    if (here) this.list.scrollTop = here.offsetTop - this.list.offsetTop - this.list.clientHeight / 2;
    const record = this.current();
    const { index, ...rest } = record ?? {};
    this.raw.textContent = record ? show(JSON.stringify(rest)).replaceAll(/,"(?=\w+":)/g, ',\n "') : "";
  }

  /** For tests: the state as plain data. */
  snapshot() {
    const { state } = this.cursor;
    const id = (/** @type {number} */ i) => this.meta.requests[i]?.id ?? null;
    return plain(state, id);
  }
}

/** @param {EngineState} state @param {(index: number) => string} id */
export function plain(state, id) {
  /** @type {Record<string, any>} */ const requests = {};
  for (const [i, r] of state.requests) requests[id(i)] = { status: STATUSES[r.status], computed: r.computed, known: r.known, tables: r.tables };
  /** @type {Record<string, any>} */ const refs = {};
  /** @type {Record<string, any>} */ const cached = {};
  /** @type {Record<string, any>} */ const rows = {};
  for (let b = 0; b < state.numBlocks; b += 1) {
    if (state.refs[b]) refs[b] = state.refs[b];
    if (state.hashed[b]) cached[b] = state.hashes[b].toString(16).padStart(8, "0");
  }
  for (const [row, i] of state.rows) rows[row] = i < 0 ? null : id(i);
  return { waiting: state.waiting.map(id), running: state.running.map(id), free_queue: state.freeQueue(), ref_counts: refs, cached_blocks: cached, requests, rows };
}

/** @param {string} name @param {string} label */
function swatch(name, label) {
  return el("span", { class: "key" }, el("span", { class: `swatch ${name}` }), label);
}

/** @param {number} request */
function hue(request) {
  return request < 0 ? "#777" : HUES[request % HUES.length];
}

/** Black or white, whichever is read better on a colour (WCAG's relative luminance).
 * @param {string} colour #rrggbb or #rgb */
function inkOn(colour) {
  const digits = colour.length === 4 ? [...colour.slice(1)].map((d) => d + d) : colour.match(/[0-9a-f]{2}/g) ?? [];
  const [r, g, b] = digits.map((d) => (parseInt(d, 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

/** Diagonal lines, so that a state is told apart without colour.
 * @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} w @param {number} h @param {string} colour */
function hatch(context, x, y, w, h, colour) {
  if (w < 2 || h < 2) return;
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.globalAlpha = 0.55;
  context.lineWidth = 1;
  context.beginPath();
  for (let d = -h; d < w; d += 5) { context.moveTo(x + d, y + h); context.lineTo(x + d + h, y); }
  context.stroke();
  context.restore();
}

/** @param {string} name @param {unknown} value @param {string} how */
function link(name, value, how) {
  return el("div", { class: "link", "data-link": name }, el("small", {}, name), el("b", {}, String(value)), el("small", {}, how));
}

/** One line on what an event did to its block. @param {any} r */
function lifeOf(r) {
  const whose = `${r.request_id}${r.logical_block != null ? ` block ${r.logical_block}` : ""}`;
  if (r.kind === "block_allocated") return `handed out to ${whose}`;
  if (r.kind === "block_touched") return `hit by ${whose}${r.was_free ? ", taken out of the free queue" : `, now ${r.ref_cnt} owners`}`;
  if (r.kind === "block_cached") return `full: cached under ${r.hash} for ${whose}`;
  if (r.kind === "block_evicted") return `evicted: hash ${r.hash} forgotten, for ${r.request_id}`;
  return `given back by ${whose} (${r.why.replaceAll("_", " ")})${r.ref_cnt ? `, ${r.ref_cnt} owners left` : `, place ${r.free_queue_index} in the free queue`}`;
}

/** The telling fields of a record in one line. @param {any} r */
function summary(r) {
  const skip = new Set(["kind", "index", "seq", "engine", "step", "t_ns", "proc"]);
  const parts = [];
  for (const [name, value] of Object.entries(r)) {
    if (skip.has(name) || value === null || (Array.isArray(value) && !value.length)) continue;
    const text = typeof value === "object" ? JSON.stringify(value) : String(value);
    parts.push(name === "request_id" ? text : `${name}=${text.length > 42 ? `${text.slice(0, 40)}…` : text}`);
    if (parts.length === 7) break;
  }
  return parts.join(" ");
}

/** @param {any} r @param {string} words */
function matches(r, words) {
  return words.replace(/block (?=\d)/g, "block").split(/\s+/).every((word) => {
    const block = /^block(\d+)$/.exec(word);
    if (block) return r.block_id === Number(block[1]);
    return r.kind.includes(word) || String(r.request_id ?? "").toLowerCase() === word;
  });
}

/** The entry point of anywidget. */
export default {
  /** @param {{model: any, el: HTMLElement}} context */
  render({ model, el: element }) {
    element.dataset.lmSuppressShortcuts = "true"; // JupyterLab's keys edit cells; here they belong to the viewer
    const chunks = model.get("chunks");
    const viewer = mount(element, { meta: JSON.parse(model.get("meta")), readChunk: (name) => chunks[name], css: model.get("css") });
    return () => viewer.destroy();
  },
};
