// @ts-check
/**
 * The state of the engine at one event, as the page keeps it. Python packed what every event changes
 * as integers (Op in ops.py); nothing here interprets an event, it only applies those changes.
 */

/** What a chunk's name stands for: base64 of raw-deflated bytes.
 * @typedef {(name: string) => string} ReadChunk */

/** @param {string} text base64 @returns {Promise<Uint8Array>} */
export async function inflate(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** LEB128 numbers, seven bits a byte. @param {Uint8Array} bytes @returns {Float64Array} */
export function varints(bytes) {
  let count = 0;
  for (const byte of bytes) if (byte < 0x80) count += 1;
  const out = new Float64Array(count); // a short hash needs 32 bits unsigned, so no Int32Array
  let value = 0, scale = 1, at = 0;
  for (const byte of bytes) {
    value += (byte & 0x7f) * scale;
    if (byte < 0x80) {
      out[at++] = value;
      value = 0;
      scale = 1;
    } else scale *= 128;
  }
  return out;
}

export const STATUSES = ["waiting", "running", "preempted"];

export class EngineState {
  /** @param {any} meta */
  constructor(meta) {
    const n = meta.num_blocks;
    this.numBlocks = n;
    this.numGroups = meta.block_sizes.length;
    this.refs = new Int32Array(n);          // owners per block
    this.hashed = new Uint8Array(n);        // 1: can be found in the prefix cache
    this.hashes = new Uint32Array(n);
    this.next = new Int32Array(n + 1);      // the free queue, through the blocks; n is both ends
    this.prev = new Int32Array(n + 1);
    this.next.fill(-1);
    this.prev.fill(-1);
    this.next[n] = this.prev[n] = n;
    this.numFree = 0;
    /** @type {number[]} */ this.waiting = [];
    /** @type {number[]} */ this.running = [];
    /** @type {Map<number, {status: number, computed: number, known: number, preemptions: number, tables: number[][]}>} */
    this.requests = new Map();
    /** @type {Map<number, number>} */ this.rows = new Map(); // row -> request, -1 unknown
  }

  /** @param {number} request */
  request(request) {
    let r = this.requests.get(request);
    if (!r) {
      const tables = Array.from({ length: this.numGroups }, () => /** @type {number[]} */ ([]));
      r = { status: 0, computed: 0, known: 0, preemptions: 0, tables };
      this.requests.set(request, r);
    }
    return r;
  }

  /** @param {number} request */
  leaveQueues(request) {
    for (const queue of [this.waiting, this.running]) {
      const at = queue.indexOf(request);
      if (at >= 0) queue.splice(at, 1);
    }
  }

  /** Apply ops[from … to). @param {Float64Array} ops @param {number} from @param {number} to */
  apply(ops, from, to) {
    let i = from;
    while (i < to) {
      const a = ops[i + 1], b = ops[i + 2], c = ops[i + 3];
      switch (ops[i]) {
        case 1: this.request(a).status = 0; this.waiting.splice(b, 0, a); i += 3; break;
        case 2: this.leaveQueues(a); i += 2; break;
        case 3: {
          this.leaveQueues(a);
          this.running.push(a);
          const r = this.request(a);
          r.status = 1;
          r.computed = b;
          i += 3;
          break;
        }
        case 4: this.request(a).computed += b; i += 3; break;
        case 5: this.request(a).known += b; i += 3; break;
        case 6: {
          this.leaveQueues(a);
          this.waiting.splice(b, 0, a);
          const r = this.request(a);
          r.status = 2;
          r.computed = 0;
          r.preemptions += 1;
          for (const table of r.tables) table.length = 0;
          i += 3;
          break;
        }
        case 7: this.leaveQueues(a); this.requests.delete(a); i += 2; break;
        case 8: this.refs[a] = b; i += 3; break;
        case 9: {
          const last = this.prev[this.numBlocks];
          this.next[last] = this.prev[this.numBlocks] = a;
          this.prev[a] = last;
          this.next[a] = this.numBlocks;
          this.numFree += 1;
          i += 2;
          break;
        }
        case 10: {
          this.next[this.prev[a]] = this.next[a];
          this.prev[this.next[a]] = this.prev[a];
          this.next[a] = this.prev[a] = -1;
          this.numFree -= 1;
          i += 2;
          break;
        }
        case 11: this.hashed[a] = 1; this.hashes[a] = b; i += 3; break;
        case 12: this.hashed[a] = 0; i += 2; break;
        case 13: this.hashed.fill(0); i += 1; break;
        case 14: this.request(a).tables[b].push(c); i += 4; break;
        case 15: this.request(a).tables[b][c] = 0; i += 4; break;
        case 16: this.rows.set(a, b - 1); i += 3; break;
        case 17: this.rows.delete(a); i += 2; break;
        case 18: this.request(a).status = b; i += 3; break;
        case 19: { // a whole table: request, group, count, blocks
          const table = this.request(a).tables[b];
          for (let k = 0; k < c; k += 1) table.push(ops[i + 4 + k]);
          i += 4 + c;
          break;
        }
        case 20: // the whole free queue: count, blocks
          for (let k = 0, last = this.numBlocks; k < a; k += 1) {
            const block = ops[i + 2 + k];
            this.next[last] = block;
            this.prev[block] = last;
            this.next[block] = this.numBlocks;
            this.prev[this.numBlocks] = last = block;
          }
          this.numFree = a;
          i += 2 + a;
          break;
        default: throw new Error(`unknown op ${ops[i]} at ${i}`);
      }
    }
  }

  /** Front first. @param {number} [most] */
  freeQueue(most = Infinity) {
    const out = [];
    for (let b = this.next[this.numBlocks]; b !== this.numBlocks && out.length < most; b = this.next[b]) out.push(b);
    return out;
  }

  /** null, free, cached, in use or shared. @param {number} block */
  stateOf(block) {
    if (block === 0) return "null";
    if (this.refs[block]) return this.refs[block] > 1 ? "shared" : "in use";
    return this.hashed[block] ? "cached" : "free";
  }

  /** Block -> the first request (by index) that holds it, -1 for nobody. */
  owners() {
    const owners = new Int32Array(this.numBlocks).fill(-1);
    for (const [index, r] of this.requests)
      for (const table of r.tables) for (const block of table) if (block && owners[block] < 0) owners[block] = index;
    return owners;
  }
}

/** Stands at an event, and moves. */
export class Cursor {
  /** @param {any} meta @param {ReadChunk} readChunk */
  constructor(meta, readChunk) {
    this.meta = meta;
    this.readChunk = readChunk;
    /** @type {Map<number, Float64Array>} */ this.opChunks = new Map();
    /** @type {Map<number, EventChunk>} */ this.eventChunks = new Map();
    /** @type {Map<number, StepRows[]>} */ this.rowChunks = new Map();
    this.state = new EngineState(meta);
    this.chunk = -1;  // whose ops have been applied, up to `offset`
    this.offset = 0;
    this.applied = 0; // the latest event whose ops have been applied
    this.event = -1;  // the state is the one after this event
  }

  /** @param {number[]} starts @param {number} event */
  static chunkOf(starts, event) {
    let low = 0, high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= Math.max(event, 0)) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** @param {number} chunk */
  async loadOps(chunk) {
    if (chunk < 0 || chunk >= this.meta.op_chunks.length) return;
    if (!this.opChunks.has(chunk)) {
      this.opChunks.set(chunk, varints(await inflate(this.readChunk(`ops${chunk}`))));
      if (this.opChunks.size > 8) this.opChunks.delete(/** @type {number} */ (this.opChunks.keys().next().value));
    }
  }

  /** Move to just after `event`; -1 is before the first. @param {number} event */
  async goto(event) {
    const chunk = Cursor.chunkOf(this.meta.op_chunks, event);
    await this.loadOps(chunk);
    const ops = /** @type {Float64Array} */ (this.opChunks.get(chunk));
    if (chunk !== this.chunk || event < this.event) {
      this.state = new EngineState(this.meta);
      this.state.apply(ops, 2, 2 + ops[1]); // the snapshot that the chunk begins with
      this.offset = 2 + ops[1];
      this.applied = ops[0];
      this.chunk = chunk;
    }
    while (this.offset < ops.length && this.applied + ops[this.offset] <= event) {
      this.applied += ops[this.offset];
      const length = ops[this.offset + 1];
      this.state.apply(ops, this.offset + 2, this.offset + 2 + length);
      this.offset += 2 + length;
    }
    this.event = event;
    void this.loadOps(chunk + 1);
  }

  /** Both designs' rows of a step; null if tracing began in mid-life, when they cannot be known.
   * @param {number} stepIndex @returns {Promise<StepRows | null>} */
  async rows(stepIndex) {
    const size = this.meta.steps_per_row_chunk;
    if (!size || !this.meta.columns.step.length) return null;
    const number = Math.floor(stepIndex / size);
    if (!this.rowChunks.has(number)) {
      this.rowChunks.set(number, stepRows(varints(await inflate(this.readChunk(`rows${number}`)))));
      if (this.rowChunks.size > 4) this.rowChunks.delete(/** @type {number} */ (this.rowChunks.keys().next().value));
    }
    return this.rowChunks.get(number)?.[stepIndex % size] ?? null;
  }

  /** The records first … last, raw. @param {number} first @param {number} last */
  async records(first, last) {
    const out = [];
    const starts = this.meta.event_chunks;
    for (let c = Cursor.chunkOf(starts, first); c < starts.length && starts[c] <= last; c += 1) {
      let chunk = this.eventChunks.get(c);
      if (!chunk) {
        const bytes = await inflate(this.readChunk(`events${c}`));
        chunk = new EventChunk(JSON.parse(new TextDecoder().decode(bytes)), starts[c]);
        this.eventChunks.set(c, chunk);
        if (this.eventChunks.size > 6) this.eventChunks.delete(/** @type {number} */ (this.eventChunks.keys().next().value));
      }
      for (let i = Math.max(first, chunk.first); i <= Math.min(last, chunk.first + chunk.length - 1); i += 1)
        out.push(chunk.record(i));
    }
    return out;
  }
}

/** Rows of one step in both index designs. In the persistent batch, place i is batch row and state row at once.
 * @typedef {{requests: number[], tokens: number[], stateRows: number[], bySize: number[]}} StepRows */

/** Numbers as BothDesigns in rows.py writes them: n; (request, tokens, state row) × n; n places.
 * @param {Float64Array} numbers @returns {StepRows[]} */
export function stepRows(numbers) {
  const steps = [];
  for (let at = 0; at < numbers.length;) {
    const n = numbers[at];
    /** @type {StepRows} */ const rows = { requests: [], tokens: [], stateRows: [], bySize: [...numbers.subarray(at + 1 + 3 * n, at + 1 + 4 * n)] };
    for (let i = 0; i < n; i += 1) {
      const k = at + 1 + 3 * i;
      rows.requests.push(numbers[k]);
      rows.tokens.push(numbers[k + 1]);
      rows.stateRows.push(numbers[k + 2]);
    }
    steps.push(rows);
    at += 1 + 4 * n;
  }
  return steps;
}

/** Where a token stands in a step's batch, or null if it is not in it. `first` is the position of its
 * request's first token in this step.
 * @param {StepRows} rows @param {"persistent" | "state-table"} design
 * @param {number} request @param {number} position @param {number} first */
export function placeInBatch(rows, design, request, position, first) {
  const i = rows.requests.indexOf(request);
  if (i < 0 || position < first || position >= first + rows.tokens[i]) return null;
  const order = design === "persistent" ? rows.requests.keys() : rows.bySize;
  let flat = position - first, batchRow = 0;
  for (const place of order) {
    if (place === i) break;
    flat += rows.tokens[place];
    batchRow += 1;
  }
  return { flat, batchRow, stateRow: design === "persistent" ? i : rows.stateRows[i] };
}

/** Columns by kind and field, turned back into records one at a time. */
class EventChunk {
  /** @param {any} columns @param {number} first */
  constructor(columns, first) {
    this.first = first;
    /** @type {[string, any][]} */ this.kinds = Object.entries(columns);
    this.length = this.kinds.reduce((sum, [, fields]) => sum + fields.i.length, 0);
    this.kindOf = new Uint8Array(this.length);  // event in the chunk -> place in kinds
    this.rowOf = new Uint32Array(this.length);  // event in the chunk -> row of that kind's columns
    this.kinds.forEach(([, fields], kind) => {
      for (const name of ["i", "seq", "t_ns"])
        for (let row = 1; row < fields[name].length; row += 1) fields[name][row] += fields[name][row - 1];
      fields.i.forEach((/** @type {number} */ i, /** @type {number} */ row) => {
        this.kindOf[i] = kind;
        this.rowOf[i] = row;
      });
    });
  }

  /** @param {number} index of the event in the whole trace */
  record(index) {
    const [kind, fields] = this.kinds[this.kindOf[index - this.first]];
    const row = this.rowOf[index - this.first];
    /** @type {any} */ const record = { kind, index };
    for (const name in fields) if (name !== "i") record[name] = fields[name][row];
    return record;
  }
}
