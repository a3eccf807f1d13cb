// @ts-check
/** Moving through time: buttons, keys, and playing. */
import { el, show } from "./dom.js";

const SPEEDS = [1, 2, 5, 10, 30]; // steps per second

export class Controls {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.playing = false;
    this.speed = SPEEDS[0];
    this.moves = {
      first: () => void viewer.goto(viewer.lastEventOf(0)),
      stepBack: () => viewer.moveSteps(-1),
      back: () => void viewer.goto(viewer.goal - 1),
      on: () => void viewer.goto(viewer.goal + 1),
      stepOn: () => viewer.moveSteps(1),
      last: () => void viewer.goto(viewer.meta.num_events - 1),
    };
    const button = (/** @type {string} */ label, /** @type {string} */ title, /** @type {() => void} */ go) =>
      el("button", { title, "aria-label": title, onclick: go }, label);
    this.position = el("output", { class: "position", "aria-live": "polite" });
    this.playButton = el("button", { class: "play", "aria-label": "play", title: "play (space)", onclick: () => this.play() }, "play");
    this.speedSelect = el("select", { "aria-label": "steps per second", onchange: () => { this.speed = Number(this.speedSelect.value); } },
      ...SPEEDS.map((s) => el("option", { value: s }, `${s}/s`)));
    this.nav = el("nav", { "aria-label": "time" },
      button("|◀", "first step (home)", this.moves.first),
      button("◀\uFE0E◀\uFE0E", "step back (shift + left)", this.moves.stepBack),
      button("◀\uFE0E", "event back (left)", this.moves.back),
      this.playButton,
      button("▶\uFE0E", "event on (right)", this.moves.on),
      button("▶\uFE0E▶\uFE0E", "step on (shift + right)", this.moves.stepOn),
      button("▶|", "last step (end)", this.moves.last),
      this.speedSelect, this.position);
    viewer.main.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => this.key(e));
  }

  /** Say where we are. @param {number} index of the step */
  draw(index) {
    const { viewer } = this, record = viewer.current();
    const first = viewer.firstEventOf(index);
    const whose = typeof record?.request_id === "string" ? ` ${record.request_id}` : ""; // some records list a request per token
    const what = record ? `: ${record.kind}${whose}` : "";
    this.position.textContent = show(`${viewer.stepName(index)} · event ${viewer.cursor.event - first + 1} of ${viewer.lastEventOf(index) - first + 1}${what}`);
  }

  async play() {
    this.playing = !this.playing;
    this.playButton.textContent = this.playing ? "pause" : "play";
    this.playButton.setAttribute("aria-label", this.playing ? "pause" : "play");
    while (this.playing && this.viewer.cursor.event < this.viewer.meta.num_events - 1) {
      const start = performance.now();
      this.moves.stepOn();
      await this.viewer.settled;
      await new Promise((next) => setTimeout(next, Math.max(0, 1000 / this.speed - (performance.now() - start))));
    }
    if (this.playing) void this.play();
  }

  /** @param {KeyboardEvent} e */
  key(e) {
    const target = /** @type {HTMLElement} */ (e.target);
    if (target.matches("input[type=search], select") || e.ctrlKey || e.metaKey || e.altKey) return;
    const { moves } = this;
    const keys = {
      ArrowLeft: e.shiftKey ? moves.stepBack : moves.back,
      ArrowRight: e.shiftKey ? moves.stepOn : moves.on,
      PageUp: moves.stepBack,
      PageDown: moves.stepOn,
      Home: moves.first,
      End: moves.last,
      t: () => this.viewer.toggleTheme(),
      Escape: () => this.viewer.forget(),
    };
    if (e.key === " " && !target.matches("button")) { e.preventDefault(); void this.play(); return; }
    const move = keys[/** @type {keyof typeof keys} */ (e.key)];
    if (move) { e.preventDefault(); move(); }
  }
}
