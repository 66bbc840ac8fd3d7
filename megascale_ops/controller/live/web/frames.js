// SPDX-License-Identifier: Apache-2.0
// Frames as they come (megascale_ops/schema/live.py), put together to what is known now.

const TYPES = {
  node: Uint16Array, local: Uint8Array, pid: Uint32Array, tp: Int16Array, pp: Int16Array, dp: Int16Array,
  ep: Int16Array, behind: Uint16Array, quiet: Uint16Array, phase: Uint8Array, judged: Uint8Array, own: Uint8Array,
  waiting: Uint8Array, cells: Uint8Array,
};
export const JUDGED = ["ok", "slow", "suspect", "lost", "gone", "unheard", "starting"];
// States of a job that is over.
export const OVER = ["failed", "finished", "stopped"];
export const UNKNOWN = 65535;
const PARTS = ["headline", "pace", "incidents", "jobs", "ledger", "lives", "checks"];

/** Numbers of a base64 column. */
export function numbers(name, text) {
  if (!text) return new TYPES[name](0);
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(text);
  else {
    const letters = atob(text);
    bytes = new Uint8Array(letters.length);
    for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at);
  }
  return new TYPES[name](bytes.buffer, 0, bytes.length / TYPES[name].BYTES_PER_ELEMENT);
}

/** All that is known of one job, and which parts the last frame changed. */
export class Known {
  constructor() {
    this.clear();
  }

  clear() {
    this.job = "";
    this.whole = false; // more than a headline is known
    this.wall_s = 0;
    this.lag_s = 0;
    this.headline = null;
    this.pace = null;
    this.ledger = null;
    this.checks = [];
    this.incidents = [];
    this.jobs = [];
    this.lives = [];
    this.nodes = [];
    this.layout = {};
    this.columns = {};
    this.phases = [];
    this.times = { row_ranks: 1, rows: 0, slots: [], turns: [] };
    this.changed = new Set();
  }

  /** Take a frame in. */
  take(frame) {
    const isOther = (frame.job ?? "") !== this.job;
    if (frame.whole || isOther) this.clear();
    this.whole ||= Boolean(frame.whole);
    const changed = new Set();
    for (const name of PARTS) {
      if (frame[name] === undefined) continue;
      this[name] = frame[name];
      changed.add(name);
    }
    if (frame.whole || isOther) for (const name of [...PARTS, "layout", "columns", "times"]) changed.add(name);
    this.job = frame.job ?? "";
    this.wall_s = frame.wall_s;
    this.lag_s = frame.lag_s ?? 0;
    if (frame.layout) {
      this.nodes = frame.layout.nodes ?? [];
      this.layout = { gpus: frame.layout.gpus ?? [] };
      for (const name of ["node", "local", "pid", "tp", "pp", "dp", "ep"]) this.layout[name] = numbers(name, frame.layout[name]);
      changed.add("layout");
    }
    if (frame.columns) {
      const { phases, ...columns } = frame.columns;
      if (phases) this.phases = phases;
      for (const [name, text] of Object.entries(columns)) this.columns[name] = numbers(name, text);
      changed.add("columns");
    }
    if (frame.times) {
      this.times = { ...this.times, ...frame.times, slots: laidOver(this.times.slots, frame.times.slots ?? []) };
      changed.add("times");
    }
    this.changed = changed;
  }

  /** How many ranks there are to show. */
  get size() {
    return this.columns.judged?.length ?? 0;
  }
}

/** Slots in order of time; what a new one overlaps is gone. */
function laidOver(known, told) {
  if (!told.length) return known;
  const news = told.map((slot) => ({ step: -1, median_s: 0, longest_s: 0, loss: null, astray: 0, ...slot, cells: numbers("cells", slot.cells) }));
  const kept = known.filter(
    (slot) => !news.some((over) => slot.start_s < over.start_s + over.length_s && over.start_s < slot.start_s + slot.length_s),
  );
  return [...kept, ...news].sort((one, other) => one.start_s - other.start_s);
}
