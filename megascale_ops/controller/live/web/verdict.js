// SPDX-License-Identifier: Apache-2.0
// The verdict first: one sentence, where, since when, how sure, what to type next. Then how far the job is.

import { OVER } from "./frames.js";
import { age, begun, clock, command, copyable, count, date, duration, fill, make, say, share, some, unbroken } from "./words.js";

// A shape for each level, so that colour is never the only sign: circle, triangle, square, ring, tick.
const SHAPES = {
  calm: "M12 3a9 9 0 1 0 0 18a9 9 0 1 0 0-18z",
  watch: "M12 2.5L22.5 21h-21z",
  act: "M3 3h18v18H3z",
  waiting: "M12 3a9 9 0 1 0 0 18a9 9 0 1 0 0-18zm0 4a5 5 0 1 1 0 10a5 5 0 1 1 0-10z",
  over: "M9.5 19.5L2 12l3-3l4.500 4.500L19 4l3 3z",
};
export const LEVEL_WORDS = { calm: "All is well", watch: "Worth a look", act: "Act", waiting: "Waiting", over: "Over" };

/** A level's shape. */
export function glyph(level) {
  return make(
    "svg",
    { viewBox: "0 0 24 24", class: `glyph ${level}`, role: "img", "aria-label": LEVEL_WORDS[level] ?? level },
    make("path", { d: SHAPES[level] ?? SHAPES.waiting, "fill-rule": "evenodd" }),
  );
}

/** The path of a culprit: rank 3 → node-12 → its GPU, or its local rank where no GPU is known. */
function path(place) {
  const parts = [`rank ${place.rank}`];
  if (place.node) parts.push(place.node);
  const local = place.local_rank ?? -1;
  if (place.gpu) parts.push(place.gpu);
  else if (local >= 0) parts.push(`local rank ${local}`);
  return make(
    "li",
    {},
    parts.flatMap((part, at) => (at ? [make("span", { class: "arrow", "aria-label": "on" }, " → "), part] : [part])),
  );
}

export class VerdictView {
  constructor(hasToken) {
    this.place = document.getElementById("verdict");
    this.said = document.getElementById("said");
    this.hasToken = hasToken;
    this.told = "";
    this.since = null;
  }

  show(known) {
    const { headline } = known;
    if (!headline) return;
    document.body.dataset.level = headline.level;
    const places = headline.places ?? [];
    const more = (headline.culprits ?? []).length - places.length;
    this.since = make("span", { class: "since" });
    this.since_wall_s = headline.since_wall_s ?? 0;
    const facts = [this.since_wall_s ? this.since : null];
    if ((headline.confidence ?? -1) >= 0) facts.push(make("span", {}, `${Math.round(headline.confidence * 100)} % sure${headline.sure_of === "place" ? " where, not that it hangs" : ""}`));
    if (headline.also) facts.push(make("span", {}, `${some(headline.also, "other warning")}`));
    if (headline.incident) facts.push(make("a", { href: `#incident=${encodeURIComponent(headline.incident)}` }, headline.incident));
    fill(
      this.place,
      make("h1", {}, glyph(headline.level), make("span", {}, unbroken(headline.sentence))),
      places.length ? make("ol", { class: "where" }, places.map(path), more > 0 ? make("li", {}, `and ${count(more)} more`) : null) : null,
      make("p", { class: "line" }, facts),
      headline.reason ? make("p", { class: "reason" }, begun(headline.reason)) : null,
      headline.done ? make("p", { class: "reason" }, make("span", { class: "label" }, "So far: "), headline.done) : null,
      headline.command ? copyable(command(headline.command, this.hasToken())) : null,
    );
    // Read aloud only when it is another verdict, not each time that a number in it moves.
    const told = [headline.level, headline.fault, headline.incident, (headline.culprits ?? []).join()].join("|");
    if (told !== this.told) {
      this.told = told;
      say(this.said, `${LEVEL_WORDS[headline.level]}. ${headline.sentence}`);
    }
  }

  /** Let time pass: ages count up between frames. */
  tick(now_wall_s) {
    if (!this.since || !this.since_wall_s) return;
    say(this.since, `since ${clock(this.since_wall_s)} (${age(Math.max(0, now_wall_s - this.since_wall_s))})`);
  }
}

const FIGURES = [
  ["step", "Step"],
  ["stepped", "Since the last step"],
  ["pace", "A step takes"],
  ["now", "Goodput, last 5 min"],
  ["hour", "Goodput, last hour"],
  ["life", "Goodput, whole job"],
  ["alive", "Running for"],
];

export class PaceView {
  constructor() {
    this.place = document.getElementById("pace");
    this.values = {};
    this.labels = {};
    fill(
      this.place,
      FIGURES.map(([name, label]) => {
        this.values[name] = make("dd", {});
        this.labels[name] = make("dt", {}, label);
        const more = name === "alive" ? (this.began = make("dd", { class: "more" })) : null;
        return make("div", { "data-name": name }, this.labels[name], this.values[name], more);
      }),
    );
    this.pace = null;
  }

  show(known) {
    const { pace } = known;
    this.place.hidden = !pace;
    this.pace = pace;
    if (!pace) return;
    say(this.values.step, (pace.step ?? -1) >= 0 ? count(pace.step) : "none yet");
    say(this.values.pace, pace.step_s ? duration(pace.step_s) : "not known");
    // Of a job that is over there is no now, and it runs no more.
    say(this.labels.alive, OVER.includes(pace.state) ? "Ran for" : "Running for");
    const began = (pace.alive_s ?? -1) < 0 ? 0 : (OVER.includes(pace.state) ? known.wall_s - Math.max(0, pace.state_age_s ?? 0) : known.wall_s) - pace.alive_s;
    say(this.began, began ? `since ${date(began)}` : "");
    say(this.values.now, OVER.includes(pace.state) ? "–" : share(pace.goodput_now));
    say(this.values.hour, share(pace.goodput_hour));
    say(this.values.life, share(pace.goodput));
    for (const name of ["now", "hour", "life", "pace"]) this.values[name].classList.toggle("unknown", this.values[name].textContent === "not known");
  }

  /** Let time pass; `passed_s` since the frame. */
  tick(passed_s) {
    if (!this.pace) return;
    const over = OVER.includes(this.pace.state);
    const more = over ? 0 : passed_s;
    const stepped = this.pace.stepped_age_s ?? -1;
    const alive = this.pace.alive_s ?? -1;
    say(this.values.stepped, stepped < 0 || over ? "–" : age(stepped + more));
    say(this.values.alive, alive < 0 ? "not known" : age(alive + more));
    this.values.stepped.classList.toggle("late", !over && stepped + more > Math.max(10, 5 * (this.pace.step_s ?? 0)));
  }
}
