// SPDX-License-Identifier: Apache-2.0
// Time from left to right, once for all pictures: how long steps took, the loss where any is told, and below it which
// ranks worked longer than the others. A step takes as long as its slowest rank; the map shows whose work that was.

import { BAND, drawLoss, hasLoss, lossFact, nameLoss } from "./loss.js";
import { Surface } from "./surface.js";
import { clock, count, day, duration, fill, make } from "./words.js";

const LEFT = 52;
const STRIP = 128;
const GAP = 26;
// A row of the map is at least so high; 256 rows take 2 pixels less than half a screen.
const LEAST_ROWS_HEIGHT = 14;
const MOST_MAP_HEIGHT = 220;
// From 125 % on a cell also has a dot, so that colour is not the only sign.
const SLOW = 125;
// The scale follows the median rank: from 20 % below the usual step to 30 % above it at least, so that a ripple of 2 % is
// no mountain range and a slowdown of 20 % takes two fifths of the height. Long steps of single ranks widen it to 60 %;
// what lies above is cut off and marked: one step of ten minutes would flatten all others.
const [LEAST_BELOW, LEAST_ABOVE, MOST_FOR_LONGEST, CUT] = [0.8, 1.3, 1.6, 3];
// From 15 % above the usual step on the line has the colour of what is slow.
const SLOWER = 1.15;
const TICKS = 4;
const STOPPED = new Set(["replacing", "restarting", "stopping", "diagnosing"]);

/** A tick of the scale, as short as what lies between two of them allows. */
function tickWord(seconds, every) {
  if (seconds < 1) return `${(seconds * 1000).toFixed(every < 0.001 ? 1 : 0)} ms`;
  if (seconds < 600) return `${seconds.toFixed(every < 0.1 ? 2 : every < 1 ? 1 : 0)} s`;
  return `${Math.round(seconds / 60)} min`;
}

/** Time of day without its date. */
const timeOfDay = (wall_s, seconds) => clock(wall_s, seconds).split(" ").pop();

export class TimesView {
  constructor() {
    this.surface = new Surface("times", () => this.draw());
    this.facts = document.getElementById("times-facts");
    this.legend = document.getElementById("times-legend");
    this.sheet = document.createElement("canvas");
    this.known = null;
    this.pinned = null; // [slot, row]
    this.hovered = null;
    this.surface.on({
      move: (x, y) => this.point(this.at(x, y)),
      leave: () => this.point(null),
      press: (x, y) => this.pin(this.at(x, y)),
      key: (key) => this.key(key),
      focus: () => !this.pinned && this.slots?.length && this.pin([this.slots.length - 1, 0]),
    });
    fill(
      this.legend,
      make("li", {}, make("span", { class: "line-sample", "aria-hidden": "true" }), "median rank"),
      make("li", {}, make("span", { class: "usual-sample", "aria-hidden": "true" }), "usual step"),
      make("li", {}, make("span", { class: "bar-sample", "aria-hidden": "true" }), "longest step"),
      make("li", {}, make("span", { class: "heat-sample", "aria-hidden": "true" }), "own work: as the median rank, to twice as much"),
    );
  }

  show(known) {
    if (this.job !== known.job) this.pinned = this.hovered = null;
    this.known = known;
    this.job = known.job;
    const has = known.times.slots.length > 0;
    document.getElementById("times-part").hidden = !has;
    if (!has) return;
    if (known.changed.has("times") || known.changed.has("incidents")) {
      this.draw();
      this.tell();
    }
  }

  /** Wall clock seconds to pixels. */
  x(wall_s) {
    return LEFT + ((wall_s - this.from_s) / (this.until_s - this.from_s)) * this.wide;
  }

  draw() {
    if (!this.known?.times.slots.length) return;
    const { surface, known } = this;
    const { slots, rows } = known.times;
    this.slots = slots;
    this.wide = surface.width() - LEFT;
    this.from_s = slots[0].start_s;
    const last = slots[slots.length - 1];
    this.until_s = Math.max(last.start_s + last.length_s, this.from_s + 10);
    this.mapHigh = Math.min(MOST_MAP_HEIGHT, Math.max(rows * LEAST_ROWS_HEIGHT, 28));
    this.lossTop = STRIP + GAP;
    this.hasLoss = hasLoss(slots);
    this.mapTop = this.lossTop + (this.hasLoss ? BAND : 0);
    const brush = surface.begin(this.mapTop + this.mapHigh + 4);
    this.colour = surface.colours(["ink", "muted", "hair", "ground", "line", "bar", "heat-low", "heat-mid", "heat-high", "lost", "slow", "focus"]);
    brush.font = surface.font(11);
    brush.textBaseline = "middle";
    this.drawTurns(brush);
    this.drawStrip(brush);
    const band = { slots, top: this.lossTop, left: LEFT, wide: this.wide, span: (slot) => this.span(slot), colour: this.colour };
    if (this.hasLoss) drawLoss(brush, band);
    this.drawHeat(brush);
    this.drawIncidents(brush);
    if (this.hasLoss) nameLoss(brush, band);
    this.ring();
  }

  /** Stretches of time in which ranks were being stopped and started. */
  drawTurns(brush) {
    const { turns } = this.known.times;
    brush.fillStyle = this.colour.hair;
    turns.forEach(([wall_s, state], place) => {
      if (!STOPPED.has(state)) return;
      const until_s = turns[place + 1]?.[0] ?? this.until_s;
      if (until_s <= this.from_s) return;
      const x = Math.max(LEFT, this.x(wall_s));
      brush.fillRect(x, 0, Math.max(1, Math.min(this.x(until_s), LEFT + this.wide) - x), STRIP);
    });
  }

  /** The scale of step times: what is usual (the quarter of the slots in which steps were shortest), least and most. */
  scale() {
    const order = (values) => values.filter(Boolean).sort((one, other) => one - other);
    const at = (sorted, part) => sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))] ?? 0;
    const medians = order(this.slots.map((slot) => slot.median_s));
    const usual_s = at(medians, 0.25) || 1;
    const longest_s = at(order(this.slots.map((slot) => slot.longest_s)), 0.9);
    const top_s = Math.max(usual_s * LEAST_ABOVE, Math.min(at(medians, 0.98) * 1.08, usual_s * CUT), Math.min(longest_s * 1.05, usual_s * MOST_FOR_LONGEST));
    const low_s = Math.min(usual_s * LEAST_BELOW, (medians[0] ?? 0) * 0.95);
    return { usual_s, top_s, low_s: low_s < usual_s * 0.4 ? 0 : low_s };
  }

  drawStrip(brush) {
    const { usual_s, top_s, low_s } = this.scale();
    this.usual_s = usual_s;
    const y = (seconds) => STRIP - 1 - ((Math.max(low_s, Math.min(seconds, top_s)) - low_s) / (top_s - low_s)) * (STRIP - 8);
    this.drawTicks(brush, low_s, top_s, y);
    brush.fillStyle = this.colour.bar;
    for (const slot of this.slots) {
      if (!slot.median_s) continue;
      const [x, wide] = this.span(slot);
      const high = y(slot.longest_s);
      brush.fillRect(x, high, Math.max(1, wide - (wide > 4 ? 1 : 0)), y(slot.median_s) - high);
      if (slot.longest_s > top_s) brush.fillRect(x, 1, Math.max(2, wide - 1), 3);
    }
    brush.lineWidth = 1;
    brush.strokeStyle = this.colour.muted;
    brush.setLineDash([4, 4]);
    brush.beginPath();
    brush.moveTo(LEFT, Math.round(y(usual_s)) + 0.5);
    brush.lineTo(LEFT + this.wide, Math.round(y(usual_s)) + 0.5);
    brush.stroke();
    brush.setLineDash([]);
    this.drawLine(brush, y, (slot) => slot.median_s < usual_s * SLOWER, this.colour.line, 1.75);
    this.drawLine(brush, y, (slot) => slot.median_s >= usual_s * SLOWER, this.colour.slow, 3);
    this.drawHours(brush);
  }

  /** The median rank's step in the slots that `wanted` says, joined to the slot before. */
  drawLine(brush, y, wanted, colour, width) {
    brush.strokeStyle = colour;
    brush.lineWidth = width;
    brush.beginPath();
    let before = null; // the slot before, if it has steps
    for (const slot of this.slots) {
      if (!slot.median_s) continue;
      const isNext = before && slot.start_s - before.start_s - before.length_s < slot.length_s * 0.5;
      if (wanted(slot)) {
        const [x, wide] = this.span(slot);
        brush.moveTo(x, y(isNext ? before.median_s : slot.median_s));
        brush.lineTo(x, y(slot.median_s));
        brush.lineTo(x + wide, y(slot.median_s));
      }
      before = slot;
    }
    brush.stroke();
  }

  /** Round step times at the left, each with a line. */
  drawTicks(brush, low_s, top_s, y) {
    const rough = (top_s - low_s) / TICKS;
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
    brush.textAlign = "right";
    for (let tick = Math.ceil(low_s / every - 1e-6); tick * every <= top_s; tick += 1) {
      const at = Math.round(y(tick * every));
      brush.fillStyle = this.colour.hair;
      brush.fillRect(LEFT, at, this.wide, 1);
      brush.fillStyle = this.colour.muted;
      brush.fillText(tickWord(tick * every, every), LEFT - 8, Math.max(6, Math.min(STRIP - 6, at)));
    }
    brush.fillStyle = this.colour.hair;
    brush.fillRect(LEFT, STRIP - 1, this.wide, 1);
  }

  drawHours(brush) {
    const span_s = this.until_s - this.from_s;
    const most = Math.max(2, Math.floor(this.wide / 110));
    const lengths = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
    const every_s = lengths.find((length) => span_s / length <= most) ?? span_s;
    const shift_s = new Date().getTimezoneOffset() * 60;
    brush.fillStyle = this.colour.muted;
    brush.textAlign = "center";
    let before_s = 0;
    for (let at = Math.ceil((this.from_s - shift_s) / every_s) * every_s + shift_s; at <= this.until_s; at += every_s) {
      const x = this.x(at);
      // The first of each day has the date: a job is watched for weeks.
      const isDay = every_s >= 86400 || day(at) !== (before_s ? day(before_s) : day(Date.now() / 1000));
      before_s = at;
      const text = isDay ? day(at) + (every_s >= 86400 ? "" : ` ${timeOfDay(at, every_s < 60)}`) : timeOfDay(at, every_s < 60);
      const half = brush.measureText(text).width / 2;
      if (x - half >= LEFT && x + half <= LEFT + this.wide) brush.fillText(text, x, STRIP + 13);
    }
  }

  drawHeat(brush) {
    const { rows, row_ranks } = this.known.times;
    const shades = this.ramp();
    const { sheet } = this;
    sheet.width = this.slots.length;
    sheet.height = Math.max(1, rows);
    const paper = sheet.getContext("2d");
    const image = paper.createImageData(sheet.width, sheet.height);
    const pixels = new Uint32Array(image.data.buffer);
    this.slots.forEach((slot, place) => {
      for (let row = 0; row < rows; row += 1) pixels[row * sheet.width + place] = shades[slot.cells[row] ?? 0];
    });
    paper.putImageData(image, 0, 0);
    brush.imageSmoothingEnabled = false;
    const high = this.mapHigh / Math.max(1, rows);
    brush.fillStyle = this.colour.ground;
    this.slots.forEach((slot, place) => {
      const [x, wide] = this.span(slot);
      brush.drawImage(sheet, place, 0, 1, sheet.height, x, this.mapTop, wide + 0.5, this.mapHigh);
      if (wide < 5 || high < 5) return;
      for (let row = 0; row < rows; row += 1) {
        if (slot.cells[row] >= SLOW) brush.fillRect(x + wide / 2 - 1, this.mapTop + (row + 0.5) * high - 1, 2, 2);
      }
    });
    brush.fillStyle = this.colour.muted;
    brush.textAlign = "right";
    const every = Math.max(1, Math.ceil(14 / high), rows > 16 ? Math.ceil(rows / 8) : 1);
    for (let row = 0; row < rows; row += every) brush.fillText(count(row * row_ranks), LEFT - 8, this.mapTop + row * high + Math.max(6, high / 2));
  }

  /** Colours by per cent of the median: calm up to 105, then warmer up to 200 and more. */
  ramp() {
    const parse = (text) => {
      const paper = document.createElement("canvas").getContext("2d");
      paper.fillStyle = text;
      paper.fillRect(0, 0, 1, 1);
      return paper.getImageData(0, 0, 1, 1).data;
    };
    const key = this.colour["heat-low"] + this.colour["heat-high"];
    if (this.rampOf === key) return this.shades;
    const stops = [[0, "heat-low"], [105, "heat-low"], [140, "heat-mid"], [200, "heat-high"], [256, "heat-high"]].map(([at, name]) => [at, parse(this.colour[name])]);
    this.shades = new Uint32Array(256);
    for (let value = 1; value < 256; value += 1) {
      const next = stops.findIndex(([at]) => at > value);
      const [[low, from], [high, to]] = [stops[next - 1], stops[next]];
      const part = (value - low) / (high - low);
      const mixed = [0, 1, 2].map((channel) => Math.round(from[channel] + part * (to[channel] - from[channel])));
      this.shades[value] = (255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
    }
    this.rampOf = key;
    return this.shades;
  }

  drawIncidents(brush) {
    for (const incident of this.known.incidents) {
      const at = incident.began_wall_s ?? 0;
      if (at < this.from_s || at > this.until_s) continue;
      const x = Math.round(this.x(at)) + 0.5;
      const isWarning = ["watching", "over", "harmless"].includes(incident.state);
      brush.strokeStyle = brush.fillStyle = isWarning ? this.colour.slow : this.colour.lost;
      brush.lineWidth = 1;
      brush.setLineDash(isWarning ? [2, 3] : []);
      brush.beginPath();
      const bands = [[0, STRIP], [this.mapTop, this.mapTop + this.mapHigh]];
      if (this.hasLoss) bands.push([this.lossTop, this.mapTop - 14]);
      for (const [top, end] of bands) {
        brush.moveTo(x, top);
        brush.lineTo(x, end);
      }
      brush.stroke();
      brush.setLineDash([]);
      brush.beginPath();
      brush.moveTo(x - 4, 0);
      brush.lineTo(x + 4, 0);
      brush.lineTo(x, 7);
      brush.fill();
    }
  }

  span(slot) {
    const x = this.x(slot.start_s);
    return [x, this.x(slot.start_s + slot.length_s) - x];
  }

  /** Slot and row at a point; row -1 above the map. */
  at(x, y) {
    if (!this.slots?.length || x < LEFT) return null;
    const wall_s = this.from_s + ((x - LEFT) / this.wide) * (this.until_s - this.from_s);
    const place = this.slots.findIndex((slot) => wall_s >= slot.start_s && wall_s < slot.start_s + slot.length_s);
    if (place < 0) return null;
    const row = y < this.mapTop ? -1 : Math.floor(((y - this.mapTop) / this.mapHigh) * this.known.times.rows);
    return [place, Math.min(row, this.known.times.rows - 1)];
  }

  point(what) {
    this.hovered = what;
    if (!this.slots) return;
    this.ring();
    this.tell();
  }

  pin(what) {
    this.pinned = what;
    this.point(null);
  }

  key(key) {
    const [place, row] = this.pinned ?? [this.slots.length - 1, 0];
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (key === "Escape") this.pin(null);
    else if (key === "Home" || key === "End") this.pin([key === "Home" ? 0 : this.slots.length - 1, row]);
    else if (key in steps) {
      const within = (value, most) => Math.min(most, Math.max(0, value));
      this.pin([within(place + steps[key][0], this.slots.length - 1), within(row + steps[key][1], this.known.times.rows - 1)]);
    } else return false;
    return true;
  }

  ring() {
    const brush = this.surface.beginOver();
    const what = this.hovered ?? this.pinned;
    const slot = what && this.slots[what[0]];
    if (!slot) return;
    const [x, wide] = this.span(slot);
    brush.strokeStyle = this.colour.focus;
    brush.lineWidth = 1.5;
    brush.strokeRect(x - 1, 1, Math.max(3, wide + 2), this.mapTop + this.mapHigh - 2);
    if (what[1] < 0) return;
    const high = this.mapHigh / this.known.times.rows;
    brush.lineWidth = 2;
    brush.strokeRect(x - 1, this.mapTop + what[1] * high - 1, Math.max(4, wide + 2), Math.max(4, high + 2));
  }

  tell() {
    const what = this.hovered ?? this.pinned;
    const slot = what && this.slots[what[0]];
    if (!slot) {
      fill(this.facts, make("span", { class: "hint" }, "Each row is a rank, or some that are neighbours: the warmer, the longer it worked while the others waited."));
      return;
    }
    const facts = [`${clock(slot.start_s)} to ${clock(slot.start_s + slot.length_s)}`];
    if ((slot.step ?? -1) >= 0) facts.push(`up to step ${count(slot.step)}`);
    facts.push(slot.median_s ? `median rank ${duration(slot.median_s)} a step` : "no step ended here");
    const more = slot.median_s / this.usual_s - 1;
    if (slot.median_s && Math.abs(more) >= 0.005) facts.push(`${Math.abs(100 * more).toFixed(0)} % ${more > 0 ? "longer" : "shorter"} than usual`);
    if (slot.longest_s) facts.push(`longest ${duration(slot.longest_s)}`);
    const loss = lossFact(slot);
    if (loss) facts.push(loss);
    const { row_ranks } = this.known.times;
    const first = what[1] * row_ranks;
    let who = null;
    if (what[1] >= 0) {
      const last = Math.min(first + row_ranks, this.known.size) - 1;
      who = make("strong", {}, last > first ? `ranks ${count(first)} to ${count(last)}` : `rank ${count(first)}`);
      const own = slot.cells[what[1]];
      facts.push(own ? `own work ${own === 255 ? "255 or more" : own} % of the median rank's${row_ranks > 1 ? " (the slowest of them)" : ""}` : "own work not known");
    }
    fill(this.facts, who, facts.map((fact) => make("span", {}, fact)));
  }
}
