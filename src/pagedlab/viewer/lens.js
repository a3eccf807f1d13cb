// @ts-check
/** The token lens: the chain of indices from a token to its slot, in both index designs. */
import { el, note, show } from "./dom.js";
import { placeInBatch } from "./model.js";

const DESIGNS = /** @type {const} */ ({ "persistent": "persistent batch", "state-table": "request-state table" });
const BYTES = /** @type {Record<string, number>} */ ({ float32: 4, bfloat16: 2, float16: 2 });

/** Where a token stands in a step's batch. `width` is K, the columns of the block table, null if it is not known.
 * @typedef {{design: keyof typeof DESIGNS, flat: number, batchRow: number, stateRow: number, tableIndex: number | null, width: number | null}} Place */

/** How a layer's buffer lies in memory: [2, blocks, block_size, kv_heads, head_dim], or with the heads before the
 * tokens of a block. A trace says how layers view it and not how it is strided, so this follows from the backend:
 * torch, like vLLM's CPU backend, puts heads first. @param {any} config of the trace's header */
function isHeadsFirst(config) {
  return config.attention_backend === "torch";
}

/** @param {string} name @param {unknown} value @param {string} how */
function link(name, value, how) {
  return el("div", { class: "link", "data-link": name }, el("small", {}, name), el("b", {}, String(value)), el("small", {}, how));
}

export class Lens {
  /** @param {import("./viewer.js").Viewer} viewer */
  constructor(viewer) {
    this.viewer = viewer;
    this.element = el("div", { class: "lens" });
    this.nodes = [this.element];
  }

  draw() {
    const { state } = this.viewer.cursor;
    const chosen = this.token();
    if (!chosen || !state.requests.has(chosen.request)) {
      const why = chosen ? `${this.viewer.idOf(chosen.request)} holds no blocks at this moment. ` : "";
      this.element.replaceChildren(note(show(`${why}Pick a token in a block table to follow it to its slot.`)));
      return;
    }
    const { tables } = state.request(chosen.request);
    this.element.replaceChildren(...tables.map((_, group) => el("div", { class: "chain", "data-group": group },
      ...(tables.length > 1 ? [el("h3", {}, `group ${group}`)] : []),
      ...this.chains(chosen.request, chosen.position, group))));
  }

  /** The chosen token; else the last one computed of the request shown, or, if it has none, of this step's batch. */
  token() {
    const { viewer } = this;
    if (viewer.token) return viewer.token;
    const request = viewer.shownRequest();
    const computed = request === null ? 0 : viewer.cursor.state.request(request).computed;
    if (request !== null && computed) return { request, position: computed - 1 };
    const map = viewer.past().findLast((e) => e.kind === "slots_mapped");
    return map?.token.length ? { request: viewer.requestOf(map.request_id.at(-1)), position: map.position.at(-1) } : null;
  }

  /** The way from a token to its slot: as recorded, and as the other index design would go.
   * @param {number} request @param {number} position @param {number} group */
  chains(request, position, group) {
    const recorded = this.recordedPlace(request, position, group);
    const designs = /** @type {(keyof typeof DESIGNS)[]} */ (Object.keys(DESIGNS));
    const derived = designs.filter((d) => d !== recorded?.design).map((d) => this.derivedPlace(d, request, position, group));
    const places = [recorded, ...derived].filter((p) => p !== null);
    if (!places.length) {
      const isDone = position < this.viewer.cursor.state.request(request).computed;
      const why = isDone ? "Written in an earlier step; the chain follows from the table as it stands." : "Not scheduled yet at this moment.";
      return [this.chain(null, request, position, group), note(why)];
    }
    return places.flatMap((place) => {
      const how = place === recorded ? "as this run recorded it" : "derived from the same messages by that design's rules; same block, same slot";
      return [el("p", { class: "note design" }, `${DESIGNS[place.design]}, ${how}`), this.chain(place, request, position, group)];
    });
  }

  /** @param {number} request @param {number} position @param {number} group @returns {Place | null} */
  recordedPlace(request, position, group) {
    const id = this.viewer.idOf(request), past = this.viewer.past();
    const map = past.find((e) => e.kind === "slots_mapped" && e.group === group);
    const ordered = past.findLast((e) => e.kind === "batch_ordered");
    const at = map ? map.request_id.findIndex((/** @type {string} */ other, /** @type {number} */ i) => other === id && map.position[i] === position) : -1;
    if (at < 0) return null;
    const batchRow = ordered ? ordered.request_ids.indexOf(id) : map.row[at];
    return {
      design: ordered?.idx_mapping ? "state-table" : "persistent", flat: map.token[at], batchRow,
      stateRow: ordered?.idx_mapping ? ordered.idx_mapping[batchRow] : map.row[at], tableIndex: map.table_index[at], width: map.table_stride,
    };
  }

  /** @param {keyof typeof DESIGNS} design @param {number} request @param {number} position @param {number} group @returns {Place | null} */
  derivedPlace(design, request, position, group) {
    const { meta, cursor, stepEvents: { rows } } = this.viewer;
    if (!rows || !this.viewer.past().some((e) => e.kind === "step_scheduled")) return null;
    const granted = rows.tokens[rows.requests.indexOf(request)] ?? 0;
    const place = placeInBatch(rows, design, request, position, cursor.state.request(request).computed - granted);
    if (!place) return null;
    const width = meta.table_widths[group];
    const logical = Math.floor(position / meta.block_sizes[group]);
    return { design, ...place, width, tableIndex: width === null ? null : place.batchRow * width + logical };
  }

  /** @param {Place | null} place @param {number} request @param {number} position @param {number} group */
  chain(place, request, position, group) {
    const { viewer } = this, size = viewer.meta.block_sizes[group];
    const logical = Math.floor(position / size), offset = position % size;
    const block = viewer.cursor.state.request(request).tables[group][logical];
    const links = [link("token", viewer.textAt(request, position), `id ${viewer.meta.requests[request].tokens[position]}`)];
    if (place) {
      links.push(link("flat index", place.flat, "in this step's batch"), link("batch row", place.batchRow, "batch_idx"));
      links.push(link("state row", place.stateRow, place.design === "state-table" ? "idx_mapping[batch row]" : "the batch row itself"));
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
    else links.push(link("block", block, "read in the table"), link("slot", block * size + offset, `${block} · ${size} + ${offset}`), link("in the cache", `[0, ${block}, ${offset}]`, this.address(group, block, offset)));
    return el("div", { class: "links", "data-design": place?.design ?? "" }, ...links.flatMap((l, i) => (i ? [el("span", { class: "to", "aria-hidden": "true" }, "→"), l] : [l])));
  }

  /** Byte offsets of a slot in one layer's buffer. @param {number} group @param {number} block @param {number} offset */
  address(group, block, offset) {
    const { header: { model, config }, block_sizes, num_blocks } = this.viewer.meta;
    const head = Number(model.head_dim) * BYTES[config.dtype]; // bytes of one token's key in one head
    if (!head) return "keys; [1, …] is the value";
    const size = block_sizes[group], heads = Number(model.num_key_value_heads);
    const strides = isHeadsFirst(config) ? { token: head, head: size * head } : { token: heads * head, head };
    const key = block * size * heads * head + offset * strides.token;
    const value = key + num_blocks * size * heads * head;
    const where = `key at byte ${key.toLocaleString("en")}, value at ${value.toLocaleString("en")}`;
    return strides.head > head && heads > 1 ? `head 0: ${where}; each further head ${strides.head.toLocaleString("en")} bytes on` : where;
  }
}
