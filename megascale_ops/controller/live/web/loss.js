// SPDX-License-Identifier: Apache-2.0
// The loss over time, between step times and the map: the mean of what the ranks told, on the scale of time of both.

const HIGH = 76;
// What the band takes with the gap below it.
export const BAND = HIGH + 14;
// 2 %: the first steps of a training, and a spike, are cut off and marked, or all that follows is a flat line.
const [LOW, TOP] = [0.02, 0.98];
// A loss that moves by less than a thousandth of itself is level.
const LEAST_SPAN = 1e-3;
const TICKS = 4;
const NAME = "loss: mean of the ranks";

/** Whether any loss is known: a job that tells none has no band. */
export const hasLoss = (slots) => slots.some((slot) => slot.loss !== null || slot.astray);

/** A loss as people read it: four digits, of a very large or small one its power of ten. */
export function lossWord(loss) {
  const size = Math.abs(loss);
  return size && (size >= 1e5 || size < 1e-3) ? loss.toExponential(2) : String(Number(loss.toPrecision(4)));
}

/** What a slot says of the loss in words; null where it says nothing. */
export function lossFact(slot) {
  const astray = slot.astray ? "loss is no number" : "";
  if (slot.loss === null) return astray || null;
  return `loss ${lossWord(slot.loss)}${astray && " where it is a number"}`;
}

/** The least and the most of the scale. */
function scale(slots) {
  const sorted = slots.map((slot) => slot.loss).filter((loss) => loss !== null).sort((one, other) => one - other);
  if (!sorted.length) return { low: 0, top: 1 };
  const at = (part) => sorted[Math.round(part * (sorted.length - 1))];
  const few = sorted.length < 50;
  const [low, top] = few ? [sorted[0], sorted.at(-1)] : [at(LOW), at(TOP)];
  const room = Math.max((top - low) * 0.08, Math.abs(top) * LEAST_SPAN, 1e-12);
  return { low: low - room, top: top + room };
}

/** Round losses at the left, each with a line. */
function drawTicks(brush, { low, most, y, left, wide, colour }) {
  const rough = (most - low) / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= rough);
  brush.textAlign = "right";
  for (let tick = Math.ceil(low / every); tick * every <= most; tick += 1) {
    const at = Math.round(y(tick * every));
    brush.fillStyle = colour.hair;
    brush.fillRect(left, at, wide, 1);
    brush.fillStyle = colour.muted;
    brush.fillText(lossWord(tick * every), left - 8, at);
  }
}

/** Say what the band is, over what marks incidents. A loss falls: at the upper right there is room. */
export function nameLoss(brush, { top, left, wide, colour }) {
  const long = brush.measureText(NAME).width;
  brush.fillStyle = colour.ground;
  brush.fillRect(left + wide - long - 8, top + 1, long + 8, 15);
  brush.fillStyle = colour.muted;
  brush.textAlign = "right";
  brush.fillText(NAME, left + wide - 4, top + 9);
}

/** Draw the band: `left` and `wide` are where time begins and how long it is, `span` gives a slot's place on it. */
export function drawLoss(brush, { slots, top, left, wide, span, colour }) {
  const { low, top: most } = scale(slots);
  const y = (loss) => top + HIGH - 1 - ((Math.max(low, Math.min(loss, most)) - low) / (most - low)) * (HIGH - 6);
  if (slots.some((slot) => slot.loss !== null)) drawTicks(brush, { low, most, y, left, wide, colour });
  brush.fillStyle = colour.hair;
  brush.fillRect(left, top + HIGH - 1, wide, 1);
  brush.strokeStyle = colour.line;
  brush.lineWidth = 1.75;
  brush.beginPath();
  let isFirst = true;
  for (const slot of slots) {
    if (slot.loss === null) continue;
    const [x, long] = span(slot);
    if (isFirst) brush.moveTo(x, y(slot.loss));
    brush.lineTo(x + long / 2, y(slot.loss));
    isFirst = false;
  }
  brush.stroke();
  for (const slot of slots) {
    const [x, long] = span(slot);
    if (slot.astray) {
      brush.fillStyle = colour.lost;
      brush.fillRect(x, top + 1, Math.max(2, long - 1), 5);
    } else if (slot.loss !== null && (slot.loss > most || slot.loss < low)) {
      brush.fillStyle = colour.slow;
      brush.fillRect(x, slot.loss > most ? top + 2 : top + HIGH - 4, Math.max(2, long - 1), 2);
    }
  }
}
