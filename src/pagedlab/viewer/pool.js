// @ts-check
/** The block pool in physical order, and the life of the block chosen in it. */
import { el, legend, plural, refill, show } from "./dom.js";
import { inflate, varints } from "./model.js";
import { hatch, hue, inkOn } from "./paint.js";

const STATES = ["null", "free", "cached", "in use", "shared"];
const MOST_CHAPTERS = 60; // of a block's life

export class Pool {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.numBlocks = viewer.meta.num_blocks;
    this.cells = new Float64Array(this.numBlocks); // what each cell of the canvas shows
    /** @type {Float64Array | null} */ this.blockEvents = null; // (gap, block) × n, once asked for
    /** @type {Awaited<ReturnType<Pool["lifeOf"]>> | null} */ this.life = null; // of the block chosen last
    this.canvas = el("canvas", { class: "pool", tabindex: 0, role: "application", "aria-label": "block pool; arrow keys choose a block" });
    this.note = el("p", { class: "note", "aria-live": "polite" });
    this.story = el("div", { class: "story" });
    this.orderBox = el("input", { type: "checkbox", onchange: () => this.draw() });
    this.nodes = [
      legend(["block-free", "free"], ["block-cached", "cached and free"], ["block-in-use", "in use, coloured by request"], ["block-shared", "shared"], ["block-null", "null"],
        ["block-mine", "of the request shown"], ...(viewer.meta.header.record === "kernels" ? [/** @type {[string, string]} */ (["block-read", "read by its attention"])] : []),
        el("label", { class: "key" }, this.orderBox, " order of the free queue")),
      this.note, this.canvas, this.story];
    this.canvas.addEventListener("pointerdown", (/** @type {PointerEvent} */ e) => {
      const box = this.canvas.getBoundingClientRect();
      const { size, columns } = this.layout();
      const block = Math.floor((e.clientY - box.top) / size) * columns + Math.floor((e.clientX - box.left) / size);
      if (block >= 0 && block < this.numBlocks) viewer.chooseBlock(block);
    });
    this.canvas.addEventListener("keydown", (/** @type {KeyboardEvent} */ e) => {
      const { columns } = this.layout();
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[e.key];
      if (by === undefined) return;
      e.preventDefault();
      e.stopPropagation();
      viewer.chooseBlock(Math.max(0, Math.min(this.numBlocks - 1, (viewer.block ?? 0) + by)));
    });
  }

  /** Cells as large as the place allows. */
  layout() {
    const width = this.canvas.parentElement?.clientWidth || 600;
    const size = Math.max(4, Math.min(Math.round(38 * this.viewer.theme.unit), Math.floor(Math.sqrt((width * 380) / this.numBlocks))));
    const columns = Math.max(1, Math.floor(width / size));
    return { size, columns, height: Math.ceil(this.numBlocks / columns) * size };
  }

  draw() {
    const { viewer } = this, { state } = viewer.cursor;
    const { size, columns, height } = this.layout();
    const { context, isFresh } = viewer.theme.ready(this.canvas, height);
    const owners = state.owners();
    const order = new Int32Array(this.numBlocks);
    if (this.orderBox.checked) state.freeQueue().forEach((block, place) => { order[block] = place + 1; });
    const shown = viewer.shownRequest();
    const mine = new Set(shown === null ? [] : (state.requests.get(shown)?.tables ?? []).flat());
    const read = this.readBlocks(), lit = new Set(viewer.litBlocks());
    if (isFresh) this.cells.fill(-1);
    const counts = STATES.map(() => 0);
    for (let block = 0; block < this.numBlocks; block += 1) {
      const refs = state.refs[block];
      const is = block === 0 ? 0 : refs > 1 ? 4 : refs ? 3 : state.hashed[block] ? 2 : 1; // place in STATES
      counts[is] += 1;
      const marks = (mine.has(block) ? 1 : 0) + (read.has(block) ? 2 : 0) + (block === viewer.block ? 4 : 0) + (lit.has(block) ? 8 : 0);
      const key = (((owners[block] + 1) * (this.numBlocks + 1) + order[block]) * 64 + Math.min(refs, 63)) * 128 + marks * 8 + is;
      if (this.cells[block] === key) continue;
      this.cells[block] = key;
      const x = (block % columns) * size, y = Math.floor(block / columns) * size;
      this.drawCell(context, x, y, size, { block, is, refs, place: order[block], marks, owner: owners[block], numFree: state.numFree });
    }
    this.note.textContent = `${counts[3]} in use, ${counts[4]} shared, ${counts[2]} cached and free, ${counts[1]} free, 1 null. Next to be handed out: ${state.freeQueue(8).join(", ") || "none"}.`;
    if (viewer.isAtRest()) void this.tellStory();
  }

  /** One block of the pool: its state by colour and by pattern, so that either is enough.
   * @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} size
   * @param {{block: number, is: number, refs: number, place: number, marks: number, owner: number, numFree: number}} cell */
  drawCell(context, x, y, size, { block, is, refs, place, marks, owner, numFree }) {
    const colour = (/** @type {string} */ name) => this.viewer.theme.colour(name);
    const s = size - (size > 8 ? 2 : 1);
    context.fillStyle = colour("paper");
    context.fillRect(x, y, size, size);
    context.fillStyle = is >= 3 ? hue(owner) : colour(["dim", "empty", "cached"][is]);
    context.fillRect(x, y, s, s);
    const outline = (/** @type {string} */ name, /** @type {number} */ width, inset = width / 2) => { // within the cell
      context.strokeStyle = colour(name);
      context.lineWidth = width;
      context.strokeRect(x + inset, y + inset, s - 2 * inset, s - 2 * inset);
    };
    if (is === 2 && size > 6) hatch(context, x, y, s, s, colour("paper"));
    if (is === 1 && size > 5) outline("line", 1);
    if (is === 4 && size > 5) outline("ink", size > 12 ? 2.5 : 1);
    if (place) {
      context.fillStyle = `rgba(128,128,128,${0.75 - 0.7 * (place / Math.max(1, numFree))})`;
      context.fillRect(x, y, s, s);
    }
    if (size >= 20) {
      context.fillStyle = is >= 3 ? inkOn(hue(owner)) : colour(is === 0 ? "paper" : "ink");
      context.font = this.viewer.theme.font(Math.min(13, (size * 0.4) / this.viewer.theme.unit));
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(place ? `${place}.` : is === 0 ? "∅" : is === 4 ? `${block}×${refs}` : String(block), x + s / 2, y + s / 2);
    }
    if (marks & 1 && block) outline("accent", size > 12 ? 2 : 1);
    if (marks & 2) {
      context.fillStyle = colour("accent");
      context.fillRect(x, y + s - Math.max(2, s / 6), s, Math.max(2, s / 6));
    }
    if (marks & 8) { // the chosen token's block
      outline("paper", 1, 3.5);
      outline("ink", 3);
    }
    if (marks & 4) outline("alert", 2.5);
  }

  /** Blocks that the attention kernel reported to have read, for the request shown. */
  readBlocks() {
    const shown = this.viewer.shownRequest();
    const id = shown === null ? null : this.viewer.idOf(shown);
    return new Set(this.viewer.past().findLast((r) => r.kind === "kv_read" && r.request_id === id)?.block_ids);
  }

  /** The life of the chosen block, event by event. */
  async tellStory() {
    const { viewer } = this, { block } = viewer;
    if (block === null) { refill(this.story); return; }
    if (this.life?.block !== block) {
      const life = await this.lifeOf(block);
      if (viewer.block !== block) return;
      this.life = life;
    }
    const { state, event } = viewer.cursor, { records, numEarlier } = this.life;
    const items = records.map((r) => el("li", { class: r.index <= event ? "past" : "future" },
      el("button", { "data-key": r.index, onclick: () => viewer.goto(r.index) }, show(`step ${r.step}: ${chapter(r)}`))));
    if (numEarlier) items.unshift(el("li", {}, `… ${plural(numEarlier, "earlier event")}`));
    const hash = state.hashed[block] ? `, hash ${state.hashes[block].toString(16).padStart(8, "0")}` : "";
    refill(this.story,
      el("h3", {}, block === 0 ? "Block 0 is the null block: a placeholder that is never handed out" : `Block ${block}: ${state.stateOf(block)}, ${plural(state.refs[block], "owner")}${hash}`),
      el("ol", { class: "life" }, ...items));
  }

  /** The records of a block's life, the latest ones if there are many. @param {number} block */
  async lifeOf(block) {
    const { viewer } = this;
    this.blockEvents ??= varints(await inflate(viewer.readChunk("block_events")));
    const mine = [];
    for (let i = 0, at = 0; i < this.blockEvents.length; i += 2) {
      at += this.blockEvents[i];
      if (this.blockEvents[i + 1] === block) mine.push(at);
    }
    /** @type {any[]} */ const records = [];
    for (const index of mine.slice(-MOST_CHAPTERS)) records.push(...(await viewer.cursor.records(index, index)));
    return { block, records, numEarlier: mine.length - records.length };
  }
}

/** One line on what an event did to its block. @param {any} r */
function chapter(r) {
  const whose = `${r.request_id}${r.logical_block != null ? ` block ${r.logical_block}` : ""}`;
  if (r.kind === "block_allocated") return `handed out to ${whose}`;
  if (r.kind === "block_touched") return `hit by ${whose}${r.was_free ? ", taken out of the free queue" : `, now ${r.ref_cnt} owners`}`;
  if (r.kind === "block_cached") return `full: cached under ${r.hash} for ${whose}`;
  if (r.kind === "block_evicted") return `evicted: hash ${r.hash} forgotten, for ${r.request_id}`;
  return `given back by ${whose} (${r.why.replaceAll("_", " ")})${r.ref_cnt ? `, ${plural(r.ref_cnt, "owner")} left` : `, place ${r.free_queue_index + 1} in the free queue`}`;
}
