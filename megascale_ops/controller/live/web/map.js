// SPDX-License-Identifier: Apache-2.0
// All ranks at once, nodes by ranks. Few nodes stand in rows with their names; many in bands, one column a node, so that
// the same place of all nodes is one line. Who is not well has a shape of its own, is drawn last and larger, and keeps
// its number: in its place where there is room, else beside it.

import { JUDGED, UNKNOWN } from "./frames.js";
import { Surface } from "./surface.js";
import { age, count, fill, make } from "./words.js";

const FEW_NODES = 16;
// Pixels from one rank to the next, in bands: the largest that fits into the height. Below 3 nobody tells ranks apart.
const LARGEST_PITCH = 16;
const LEAST_PITCH = 3;
const ROW_PITCH = 26;
// Of a name of 12 pixels, from one to the next.
const LINE = 16;
// Up to 64 ranks in trouble are drawn larger than their place; more of them are seen anyway.
const MOST_MARKED = 64;
const MARK = 11;
// Room for a number in a rank's place, in pixels.
const LEAST_FOR_NUMBER = 20;
// Of up to 12 that are not well each has its number beside it where places have no room; more would hide the map.
const MOST_NUMBERED = 12;
// 3 s: three heartbeats without a sign of progress.
const QUIET_S = 3;
const WORDS = { ok: "make progress", slow: "slow", suspect: "suspect", lost: "stand still", gone: "ended", unheard: "not heard", starting: "starting, no step yet" };
// What is not held against a rank: it is never drawn larger, nor found by n.
const WELL = ["ok", "quiet", "starting"];

/** The shape of a state, centred at (x, y), `size` wide. */
function trace(brush, state, x, y, size) {
  const half = size / 2;
  if (state === "slow") {
    brush.moveTo(x, y - half);
    brush.lineTo(x + half, y + half);
    brush.lineTo(x - half, y + half);
  } else if (state === "suspect") {
    brush.moveTo(x, y - half);
    brush.lineTo(x + half, y);
    brush.lineTo(x, y + half);
    brush.lineTo(x - half, y);
  } else if (state === "starting") {
    brush.moveTo(x + half, y);
    brush.arc(x, y, half, 0, 2 * Math.PI);
  } else if (state === "unheard") {
    const small = Math.max(1, half * 0.4);
    brush.rect(x - small, y - small, 2 * small, 2 * small);
    return;
  } else {
    brush.rect(x - half, y - half, size, size);
    return;
  }
  brush.closePath();
}

/** One state's shape for the legend. */
function sample(state) {
  const shapes = {
    ok: "M2 2h12v12H2z", quiet: "M5 5h6v6H5z", slow: "M8 1.500L15 14.500H1z", suspect: "M8 1l7 7l-7 7l-7-7z",
    lost: "M1 1h14v14H1zM4 5.200L6.800 8L4 10.800L5.200 12L8 9.200L10.800 12L12 10.800L9.200 8L12 5.200L10.800 4L8 6.800L5.200 4z",
    gone: "M1 1h14v14H1zM3.500 3.500v9h9v-9z", unheard: "M6.500 6.500h3v3h-3z",
    starting: "M8 2a6 6 0 1 0 0 12a6 6 0 1 0 0-12z",
  };
  return make(
    "svg",
    { viewBox: "0 0 16 16", class: `sample ${state}`, "aria-hidden": "true" },
    make("path", { d: shapes[state], "fill-rule": "evenodd" }),
  );
}

export class MapView {
  constructor() {
    this.surface = new Surface("map", () => this.draw());
    this.legend = document.getElementById("legend");
    this.facts = document.getElementById("rank-facts");
    this.known = null;
    this.pinned = -1;
    this.hovered = -1;
    this.surface.on({
      move: (x, y) => this.point(this.at(x, y)),
      leave: () => this.point(-1),
      press: (x, y) => this.pin(this.at(x, y)),
      key: (key) => this.key(key),
      focus: () => this.known?.size && this.pinned < 0 && this.pin(0),
    });
  }

  show(known) {
    const isNew = this.job !== known.job;
    this.known = known;
    this.job = known.job;
    if (isNew) this.pinned = -1;
    document.getElementById("map-part").hidden = !known.size;
    if (!known.size) return;
    if (known.changed.has("layout") || isNew) this.seat();
    if (known.changed.has("layout") || known.changed.has("columns")) {
      this.draw();
      this.tell();
    }
  }

  /** Find out who sits where: by rank the node's place and the place on the node; by seat the rank. */
  seat() {
    const { layout, nodes, size } = this.known;
    const locals = layout.local ?? [];
    this.nodes = Math.max(1, nodes.length);
    let most = Math.ceil(size / this.nodes) - 1;
    for (let rank = 0; rank < locals.length; rank += 1) if (locals[rank] < 255 && locals[rank] > most) most = locals[rank];
    this.each = Math.max(1, most + 1);
    this.nodeOf = new Int32Array(size);
    this.localOf = new Int32Array(size);
    this.rankAt = new Int32Array(this.nodes * this.each).fill(-1);
    for (let rank = 0; rank < size; rank += 1) {
      const isKnown = layout.node?.[rank] !== undefined && layout.node[rank] !== UNKNOWN && locals[rank] < 255;
      this.nodeOf[rank] = isKnown ? layout.node[rank] : Math.floor(rank / this.each);
      this.localOf[rank] = isKnown ? locals[rank] : rank % this.each;
      this.rankAt[this.nodeOf[rank] * this.each + this.localOf[rank]] = rank;
    }
  }

  /** Choose rows or bands and how large ranks are; returns the height. */
  measure(width) {
    if (this.nodes <= FEW_NODES) {
      const names = this.known.nodes.map((name) => name.length);
      this.label = Math.min(180, 16 + 7.3 * Math.max(4, ...names));
      this.isRows = true;
      this.pitch = Math.min(ROW_PITCH, Math.max(6, Math.floor((width - this.label) / this.each)));
      const block = this.label + this.each * this.pitch + 28;
      this.perBand = Math.max(1, Math.min(this.nodes, Math.floor((width + 28) / block)));
      this.blockX = block;
      this.blockY = Math.max(this.pitch + 6, LINE);
      return Math.ceil(this.nodes / this.perBand) * this.blockY + 2;
    }
    this.isRows = false;
    this.label = 0;
    const highest = width < 600 ? 560 : 400;
    for (this.pitch = LARGEST_PITCH; this.pitch > LEAST_PITCH; this.pitch -= 1) {
      this.perBand = Math.floor(width / this.pitch);
      if (Math.ceil(this.nodes / this.perBand) * (this.each * this.pitch + this.pitch) <= highest) break;
    }
    this.perBand = Math.max(1, Math.floor(width / this.pitch));
    this.blockX = this.pitch;
    this.blockY = this.each * this.pitch + this.pitch;
    return Math.ceil(this.nodes / this.perBand) * this.blockY;
  }

  /** The upper left corner of a rank's place. */
  corner(rank) {
    const node = this.nodeOf[rank];
    const x = (node % this.perBand) * this.blockX;
    const y = Math.floor(node / this.perBand) * this.blockY;
    return this.isRows ? [x + this.label + this.localOf[rank] * this.pitch, y] : [x, y + this.localOf[rank] * this.pitch];
  }

  /** The rank at a point, -1 for none. */
  at(x, y) {
    if (!this.known?.size || x < 0 || y < 0) return -1;
    const column = Math.floor(x / this.blockX);
    const band = Math.floor(y / this.blockY);
    const along = this.isRows ? x - column * this.blockX - this.label : y - band * this.blockY;
    const local = Math.floor(along / this.pitch);
    if (column >= this.perBand || local < 0 || local >= this.each) return -1;
    return this.rankAt[(band * this.perBand + column) * this.each + local] ?? -1;
  }

  draw() {
    if (!this.known?.size || !this.nodeOf) return;
    const { surface, known } = this;
    const height = this.measure(surface.width());
    const brush = surface.begin(height);
    const colour = surface.colours(["ok", "quiet", "starting", "slow", "suspect", "lost", "gone", "unheard", "ground", "on-ok", "on-slow", "on-suspect", "on-lost", "on-gone", "on-unheard", "muted", "ink"]);
    const judged = known.columns.judged;
    const quiet = known.columns.quiet ?? [];
    const groups = { ok: [], quiet: [], starting: [], slow: [], suspect: [], lost: [], gone: [], unheard: [] };
    for (let rank = 0; rank < judged.length; rank += 1) {
      const state = JUDGED[judged[rank]];
      groups[state === "ok" && quiet[rank] >= QUIET_S && quiet[rank] !== UNKNOWN ? "quiet" : state].push(rank);
    }
    const gap = this.pitch >= 12 ? 3 : 1;
    const cell = this.pitch - gap;
    const centre = cell / 2;
    for (const [state, those] of Object.entries(groups)) {
      if (!those.length) continue;
      if (this.isRows && cell >= LEAST_FOR_NUMBER && !WELL.includes(state)) {
        this.numbered(brush, state, those, cell, colour);
        continue;
      }
      const isMarked = ![...WELL, "unheard"].includes(state) && those.length <= MOST_MARKED && cell < MARK;
      const size = isMarked ? MARK : state !== "quiet" ? cell : this.isRows && cell >= LEAST_FOR_NUMBER ? cell * 0.84 : Math.max(2, cell * 0.55);
      if (isMarked) {
        brush.beginPath();
        for (const rank of those) {
          const [x, y] = this.corner(rank);
          trace(brush, state, x + centre, y + centre, MARK + 4);
        }
        brush.fillStyle = colour.ground;
        brush.fill();
      }
      brush.beginPath();
      for (const rank of those) {
        const [x, y] = this.corner(rank);
        trace(brush, state, x + centre, y + centre, size);
      }
      brush.fillStyle = colour[state];
      brush.fill();
      if ((state === "lost" || state === "gone") && size >= 5) this.hollow(brush, state, those, centre, size, colour.ground);
    }
    if (this.isRows) this.name(brush, colour, groups);
    if (!this.isRows || cell < LEAST_FOR_NUMBER) this.numberBeside(brush, groups, cell, colour);
    this.ring();
    this.count(groups);
  }

  /** Ranks that are not well, where there is room: the sign in the upper half of the place, the number in the lower. */
  numbered(brush, state, those, cell, colour) {
    brush.beginPath();
    for (const rank of those) brush.rect(...this.corner(rank), cell, cell);
    brush.fillStyle = colour[state];
    brush.fill();
    const size = cell * 0.42;
    const at = those.map((rank) => this.corner(rank)).map(([x, y]) => [x + cell / 2, y + 1.5 + size / 2]);
    brush.fillStyle = brush.strokeStyle = colour[`on-${state}`];
    brush.lineWidth = 1.75;
    brush.beginPath();
    for (const [x, y] of at) {
      if (state === "lost") {
        const half = size * 0.4;
        brush.moveTo(x - half, y - half);
        brush.lineTo(x + half, y + half);
        brush.moveTo(x + half, y - half);
        brush.lineTo(x - half, y + half);
      } else if (state === "gone") brush.rect(x - size * 0.36, y - size * 0.36, size * 0.72, size * 0.72);
      else trace(brush, state, x, y, size);
    }
    if (state === "lost" || state === "gone") brush.stroke();
    else brush.fill();
    brush.textAlign = "center";
    brush.textBaseline = "alphabetic";
    those.forEach((rank, place) => {
      const text = String(rank);
      brush.font = `600 ${this.surface.font(text.length > 3 ? 8 : 11)}`;
      brush.fillText(text, at[place][0], this.corner(rank)[1] + cell - 2);
    });
    brush.textAlign = "start";
  }

  /** Numbers beside ranks that are not well, where their places are too small for them. */
  numberBeside(brush, groups, cell, colour) {
    const those = ["slow", "suspect", "lost", "gone"].flatMap((state) => groups[state]);
    if (those.length > MOST_NUMBERED) return;
    brush.font = `600 ${this.surface.font(11)}`;
    brush.textBaseline = "middle";
    const most = this.surface.width();
    for (const rank of those) {
      const [x, y] = this.corner(rank);
      const text = count(rank);
      const wide = brush.measureText(text).width + 6;
      const right = x + cell / 2 + MARK / 2 + 3;
      const left = right + wide <= most ? right : x + cell / 2 - MARK / 2 - 3 - wide;
      const middle = Math.max(8, y + cell / 2);
      brush.fillStyle = colour.ground;
      brush.fillRect(left, middle - 8, wide, 16);
      brush.fillStyle = colour.ink;
      brush.fillText(text, left + 3, middle + 0.5);
    }
  }

  /** What tells a lost rank (a cross) and one that ended (a frame) from others when colours do not. */
  hollow(brush, state, those, centre, size, ground) {
    brush.strokeStyle = brush.fillStyle = ground;
    brush.lineWidth = Math.max(1, size / 9);
    brush.beginPath();
    for (const rank of those) {
      const [x, y] = this.corner(rank);
      const inner = size * (state === "lost" ? 0.22 : 0.3);
      const [cx, cy] = [x + centre, y + centre];
      if (state === "gone") brush.rect(cx - inner, cy - inner, 2 * inner, 2 * inner);
      else {
        brush.moveTo(cx - inner, cy - inner);
        brush.lineTo(cx + inner, cy + inner);
        brush.moveTo(cx + inner, cy - inner);
        brush.lineTo(cx - inner, cy + inner);
      }
    }
    if (state === "gone") brush.fill();
    else brush.stroke();
  }

  /** Names of nodes, and numbers in ranks that are well; those that are not have theirs already. */
  name(brush, colour, groups) {
    brush.font = this.surface.font(12);
    brush.textBaseline = "middle";
    brush.fillStyle = colour.muted;
    const cell = this.pitch - 3;
    this.known.nodes.forEach((node, place) => {
      const x = (place % this.perBand) * this.blockX;
      const y = Math.floor(place / this.perBand) * this.blockY;
      const most = Math.floor((this.label - 12) / 7.3);
      const shown = node.length > most ? `…${node.slice(1 - most)}` : node; // names of a cluster differ at their ends
      brush.fillText(shown, x, Math.max(LINE / 2, y + cell / 2 + 1));
    });
    if (cell < LEAST_FOR_NUMBER) return;
    brush.textAlign = "center";
    brush.font = this.surface.font(11);
    for (const [those, shade] of [[groups.ok, "on-ok"], [groups.starting, "on-ok"], [groups.quiet, "ink"]]) {
      brush.fillStyle = colour[shade];
      for (const rank of those) {
        const [x, y] = this.corner(rank);
        if (rank < 1000) brush.fillText(String(rank), x + cell / 2, y + cell / 2 + 1);
      }
    }
    brush.textAlign = "start";
  }

  ring() {
    const brush = this.surface.beginOver();
    const rank = this.hovered >= 0 ? this.hovered : this.pinned;
    if (rank < 0 || rank >= this.known.size) return;
    const [x, y] = this.corner(rank);
    const cell = this.pitch - (this.pitch >= 12 ? 3 : 1);
    const size = Math.max(cell + 5, MARK + 4);
    const colour = this.surface.colours(["focus", "ground"]);
    for (const [width, stroke] of [[5, colour.ground], [2, colour.focus]]) {
      brush.lineWidth = width;
      brush.strokeStyle = stroke;
      brush.strokeRect(x + cell / 2 - size / 2, y + cell / 2 - size / 2, size, size);
    }
  }

  count(groups) {
    const words = { ...WORDS, quiet: `quiet for ${QUIET_S} s and more` };
    const text = Object.entries(groups).map(([state, those]) => `${state}${those.length}`).join();
    if (text === this.counted) return;
    this.counted = text;
    fill(
      this.legend,
      Object.entries(groups)
        .filter(([, those]) => those.length)
        .map(([state, those]) => make("li", {}, sample(state), `${count(those.length)} ${words[state]}`)),
    );
  }

  point(rank) {
    if (rank === this.hovered) return;
    this.hovered = rank;
    this.ring();
    this.tell();
  }

  pin(rank) {
    this.pinned = rank;
    this.hovered = -1;
    if (!this.known?.size) return;
    this.ring();
    this.tell();
  }

  key(key) {
    const last = this.known.size - 1;
    const seat = (node, local) => this.rankAt[node * this.each + local] ?? -1;
    const rank = Math.max(0, this.pinned);
    const [node, local] = [this.nodeOf[rank], this.localOf[rank]];
    const steps = this.isRows
      ? { ArrowLeft: rank - 1, ArrowRight: rank + 1, ArrowUp: seat(node - this.perBand, local), ArrowDown: seat(node + this.perBand, local) }
      : {
          ArrowLeft: seat(node - 1, local),
          ArrowRight: seat(node + 1, local),
          ArrowUp: local > 0 ? seat(node, local - 1) : seat(node - this.perBand, this.each - 1),
          ArrowDown: local < this.each - 1 ? seat(node, local + 1) : seat(node + this.perBand, 0),
        };
    if (key in steps) this.pin(steps[key] >= 0 && steps[key] <= last ? steps[key] : rank);
    else if (key === "Home" || key === "End") this.pin(key === "Home" ? 0 : last);
    else if (key === "n") this.pin(this.nextUnwell(rank));
    else if (key === "Escape") this.pin(-1);
    else return false;
    return true;
  }

  nextUnwell(rank) {
    const { judged } = this.known.columns;
    for (let more = 1; more <= judged.length; more += 1) if (!WELL.includes(JUDGED[judged[(rank + more) % judged.length]])) return (rank + more) % judged.length;
    return rank;
  }

  /** Say what is known of the rank that is pointed at. */
  tell() {
    const rank = this.hovered >= 0 ? this.hovered : this.pinned;
    if (rank < 0 || rank >= this.known.size) {
      fill(this.facts, make("span", { class: "hint" }, "Point at a rank, tap it, or use the arrow keys; n finds the next one that is not well."));
      return;
    }
    const { layout, columns, nodes, phases, pace } = this.known;
    const state = JUDGED[columns.judged[rank]];
    const local = layout.local?.[rank] ?? 255;
    const place = (this.known.headline?.places ?? []).find((one) => one.rank === rank);
    const gpu = layout.gpus?.[rank] || place?.gpu;
    const node = nodes[layout.node?.[rank]];
    const facts = [node ? `host ${node}` : "host not known", local < 255 ? `local rank ${local}` : "", gpu ? (gpu.startsWith("GPU") ? gpu : `GPU ${gpu}`) : ""];
    const mesh = ["tp", "pp", "dp", "ep"].filter((axis) => (layout[axis]?.[rank] ?? -1) >= 0);
    if (mesh.length) facts.push(mesh.map((axis) => `${axis} ${layout[axis][rank]}`).join(" "));
    if (layout.pid?.[rank]) facts.push(`pid ${layout.pid[rank]}`);
    if (state !== "ok") facts.push(WORDS[state]);
    const behind = columns.behind?.[rank] ?? UNKNOWN;
    if (behind !== UNKNOWN && pace) facts.push(`step ${count(pace.step - behind)}${behind ? ` (${count(behind)} behind)` : ""}`);
    if (columns.phase?.[rank] !== 255 && phases[columns.phase?.[rank]]) facts.push(`in ${phases[columns.phase[rank]]}`);
    const quiet = columns.quiet?.[rank] ?? UNKNOWN;
    if (quiet !== UNKNOWN) facts.push(quiet ? `no progress for ${age(quiet)}` : "moved within the last second");
    if (columns.own?.[rank]) facts.push(`own work ${columns.own[rank]} % of the median rank's`);
    if (columns.waiting?.[rank] <= 100) facts.push(`waits ${columns.waiting[rank]} % of a step`);
    const log = make("a", { href: `#log=${rank}&job=${encodeURIComponent(this.job)}` }, "what it printed");
    fill(this.facts, make("strong", {}, `rank ${count(rank)}`), facts.filter(Boolean).map((fact) => make("span", {}, fact)), log);
  }
}
