// @ts-check
/** The run as a whole: tokens of each step against the budget, and each request's lane. Both are drawn once. */
import { brief, el, legend, plural, show } from "./dom.js";
import { hatch } from "./paint.js";

const KINDS_OF_WORK = ["recomputed", "prefill", "decode", "queued", "preempted", "passed over"]; // as pack.py numbers them
const BARS_HEIGHT = 110; // pixels; the numbers of the steps stand below

/** A mark over a canvas at the step shown. @param {HTMLElement} head @param {number} index @param {number} steps */
function movePlayhead(head, index, steps) {
  head.style.left = `${(index * 100) / steps}%`;
  head.style.width = `max(${100 / steps}%, 2px)`;
}

export class Timeline {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    const { columns, num_blocks } = viewer.meta;
    this.steps = viewer.steps;
    this.canvas = el("canvas", { class: "timeline", tabindex: 0, role: "slider", "aria-label": "steps", "aria-valuemin": 0, "aria-valuemax": this.steps - 1 });
    this.head = el("div", { class: "playhead" });
    this.budget = Math.max(0, ...columns.budget); // tokens a step, 0 if it is not known
    const most = Math.max(1, ...[...Array(this.steps).keys()].map((i) => columns.prefill[i] + columns.recomputed[i] + columns.decode[i]));
    this.top = Math.min(this.budget || most, most * 1.25); // tokens that the picture is high
    const budget = this.budget ? `budget of ${this.budget.toLocaleString("en")}${this.budget > this.top ? ", above the picture" : ""}` : "budget";
    this.nodes = [
      el("div", { class: "under" }, this.canvas, this.head),
      legend(["prefill", "prompt tokens"], ["recomputed", "computed again"], ["decode", "decode tokens"], `╌ ${budget}`, `━ blocks in use, of ${(num_blocks - 1).toLocaleString("en")}`, "▼ preemption")];
    this.canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ e) => { this.canvas.setPointerCapture(e.pointerId); this.scrub(e); });
    this.canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ e) => { if (e.buttons) this.scrub(e); });
  }

  /** Go to the step under the pointer; the lanes are as wide. @param {PointerEvent} e */
  scrub(e) {
    const box = this.canvas.getBoundingClientRect();
    const index = Math.floor(((e.clientX - box.left) / box.width) * this.steps);
    void this.viewer.goto(this.viewer.lastEventOf(Math.max(0, Math.min(this.steps - 1, index))));
  }

  /** @param {number} index of the step */
  draw(index) {
    movePlayhead(this.head, index, this.steps);
    this.canvas.setAttribute("aria-valuenow", String(index));
    this.canvas.setAttribute("aria-valuetext", this.viewer.stepName(index));
    const { theme } = this.viewer;
    const { context, width, isFresh } = theme.ready(this.canvas, BARS_HEIGHT + Math.round(18 * theme.unit));
    if (!isFresh) return;
    const bar = width / this.steps;
    this.drawBars(context, bar);
    this.drawPoolUse(context, bar);
    this.drawNumbers(context, bar);
    if (this.budget && this.budget <= this.top) {
      context.setLineDash([4, 4]);
      context.strokeStyle = theme.colour("dim");
      context.beginPath();
      context.moveTo(0, this.level(this.budget / this.top));
      context.lineTo(width, this.level(this.budget / this.top));
      context.stroke();
      context.setLineDash([]);
    }
  }

  /** Height of a share of the whole, leaving room for the marks above. @param {number} share */
  level(share) {
    return BARS_HEIGHT - 4 - share * (BARS_HEIGHT - 22);
  }

  /** @param {CanvasRenderingContext2D} context @param {number} bar a step's width */
  drawBars(context, bar) {
    const { theme, meta: { columns } } = this.viewer;
    for (let i = 0; i < this.steps; i += 1) {
      let tokens = 0;
      for (const kind of ["decode", "recomputed", "prefill"]) {
        if (!columns[kind][i]) continue;
        context.fillStyle = theme.colour(kind);
        const from = this.level(tokens / this.top), to = this.level((tokens + columns[kind][i]) / this.top);
        context.fillRect(i * bar, to, Math.max(bar - (bar > 4 ? 1 : 0), 0.5), from - to);
        if (kind !== "decode" && bar > 5) hatch(context, i * bar, to, bar - 1, from - to, theme.colour("paper"));
        tokens += columns[kind][i];
      }
      if (columns.preempted[i]) {
        context.fillStyle = theme.colour("alert");
        context.beginPath();
        context.moveTo(i * bar + bar / 2 - 4, 2);
        context.lineTo(i * bar + bar / 2 + 4, 2);
        context.lineTo(i * bar + bar / 2, 9);
        context.fill();
      }
    }
  }

  /** @param {CanvasRenderingContext2D} context @param {number} bar a step's width */
  drawPoolUse(context, bar) {
    const { theme, meta: { columns, num_blocks } } = this.viewer;
    context.strokeStyle = theme.colour("ink");
    context.lineWidth = 1.5;
    context.beginPath();
    for (let i = 0; i < this.steps; i += 1) {
      const level = this.level(columns.used[i] / Math.max(1, num_blocks - 1));
      context.lineTo(i * bar, level);
      context.lineTo((i + 1) * bar, level);
    }
    context.stroke();
  }

  /** Numbers of steps, as many as there is room for. @param {CanvasRenderingContext2D} context @param {number} bar a step's width */
  drawNumbers(context, bar) {
    const { theme, meta: { columns } } = this.viewer;
    const every = roundUp((34 * theme.unit) / bar);
    context.fillStyle = theme.colour("dim");
    context.font = theme.font(12);
    context.textAlign = "center";
    context.textBaseline = "top";
    for (let i = 0; i < this.steps; i += 1) {
      if (columns.step[i] >= 0 && columns.step[i] % every === 0) context.fillText(String(columns.step[i]), Math.max((i + 0.5) * bar, 5 * theme.unit), BARS_HEIGHT + 2);
    }
  }
}

/** The smallest of 1, 2, 5, 10, 20, … that is no smaller. @param {number} number */
function roundUp(number) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, number)));
  return [1, 2, 5, 10].map((k) => k * power).find((k) => k >= number) ?? 10 * power;
}

export class Lanes {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.requests = viewer.meta.requests;
    this.canvas = el("canvas", { class: "lanes", tabindex: 0, role: "application", "aria-label": `${plural(this.requests.length, "request")} through time; up and down choose one` });
    this.head = el("div", { class: "playhead line" });
    this.mark = el("div", { class: "lane-mark" });
    this.scroll = el("div", { class: "scroll" }, el("div", { class: "under" }, this.canvas, this.head, this.mark));
    this.nodes = [
      this.scroll,
      legend(.../** @type {[string, string][]} */ (["queued", "prefill", "decode", "recomputed", "preempted", "passed over"].map((k) => [k, k])))];
    const under = (/** @type {PointerEvent} */ e) => Math.floor((e.clientY - this.canvas.getBoundingClientRect().top) / this.height);
    this.canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ e) => {
      if (under(e) < this.requests.length) viewer.chooseRequest(under(e));
      viewer.timeline.scrub(e);
    });
    this.canvas.addEventListener("pointermove", (/** @type {PointerEvent} */ e) => { this.canvas.title = show(this.requests[under(e)]?.id); });
    this.canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[e.key];
      if (by === undefined) return;
      e.preventDefault();
      const request = viewer.request === null ? 0 : viewer.request + by;
      if (request >= 0 && request < this.requests.length && request !== viewer.request) viewer.chooseRequest(request);
      this.mark.scrollIntoView({ block: "nearest" });
    });
  }

  /** Of a lane, in pixels; many are thin and have no names. */
  get height() {
    return this.requests.length > 40 ? 8 : Math.round(18 * this.viewer.theme.unit);
  }

  /** @param {number} index of the step */
  draw(index) {
    const { viewer, height } = this;
    movePlayhead(this.head, index, viewer.steps);
    this.mark.hidden = viewer.request === null;
    this.mark.style.top = `${(viewer.request ?? 0) * height}px`;
    this.mark.style.height = `${height}px`;
    const { context, width, isFresh } = viewer.theme.ready(this.canvas, Math.max(1, this.requests.length) * height);
    if (!isFresh) return;
    const bar = width / viewer.steps, first = viewer.meta.columns.step[0];
    for (const [request, kind, from, to] of viewer.meta.segments) {
      const x = (from - first) * bar, y = request * height + 1, w = Math.max((to - from + 1) * bar - 0.5, 0.5);
      const thin = kind >= 3 ? height / 3 : 0; // not running: a thin line
      context.fillStyle = viewer.theme.colour(KINDS_OF_WORK[kind].replace(" ", "-"));
      context.fillRect(x, y + thin, w, height - 2 - 2 * thin);
      if (kind <= 1 && height > 10) hatch(context, x, y, w, height - 2, viewer.theme.colour("paper"));
    }
    if (height > 10) this.drawNames(context, width, bar);
  }

  /** Each at the beginning of its lane. @param {CanvasRenderingContext2D} context @param {number} width @param {number} bar */
  drawNames(context, width, bar) {
    const { theme, meta } = this.viewer;
    context.font = theme.font(12, 600);
    context.textBaseline = "middle";
    context.lineJoin = "round";
    context.strokeStyle = theme.colour("paper");
    context.lineWidth = 3;
    context.fillStyle = theme.colour("ink");
    this.requests.forEach((/** @type {any} */ r, /** @type {number} */ i) => {
      const start = meta.segments.find((/** @type {number[]} */ s) => s[0] === i);
      const x = start ? Math.max(2, Math.min((start[2] - meta.columns.step[0]) * bar + 3, width - 60)) : 2;
      const y = (i + 0.5) * this.height;
      context.strokeText(brief(r.id), x, y);
      context.fillText(brief(r.id), x, y);
    });
  }
}
