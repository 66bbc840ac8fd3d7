// SPDX-License-Identifier: Apache-2.0
// Where the job's time went: one bar and one line for each row of the ledger (megascale_ops/ledger.py) that has any.

import { age, fill, make } from "./words.js";

// Rows in the order in which they are shown, and what each holds.
const ROWS = {
  train: ["training", "steps that count, without what follows"],
  straggle: ["waiting for the slowest", "inside steps"],
  checkpoint: ["checkpoints", "inside steps"],
  recompute: ["steps made twice", "after a restart, until training was where it had been"],
  idle: ["waiting for nodes", "too few to form a round"],
  start: ["first start", "until the first step"],
  detect: ["noticing", "from a fault until it was noticed"],
  diagnose: ["judging", "from then until it was decided what to do"],
  check: ["measuring nodes", "self-checks before nodes took part again"],
  restart: ["restarting", "stopping ranks, a new round, starting processes"],
  reload: ["loading again", "imports and checkpoint, until the first step of every rank"],
  other: ["no step ended", "steps cut off, evaluation, the end of the script"],
  unknown: ["not known", "no steps were recorded"],
};

const part = (seconds, whole_s) => (whole_s > 0 ? `${((100 * seconds) / whole_s).toFixed(1)} %` : "");

export class LedgerView {
  constructor() {
    this.part = document.getElementById("ledger-part");
    this.place = document.getElementById("ledger");
  }

  show(known) {
    const { ledger } = known;
    this.part.hidden = !(ledger?.wall_s > 0);
    if (this.part.hidden || !known.changed.has("ledger")) return;
    const [rows, hour] = [ledger.rows ?? {}, ledger.hour ?? {}];
    // Of a job that is younger than an hour both are the same.
    const hasHour = ledger.wall_s - (ledger.hour_s ?? 0) > 1;
    const names = Object.keys(ROWS).filter((name) => rows[name] > 0 || hour[name] > 0);
    const bar = names.filter((name) => rows[name] > 0).map((name) => {
      const piece = make("span", { class: `row-${name}`, title: `${ROWS[name][0]}: ${age(rows[name])}` });
      piece.style.flexGrow = String(rows[name] / ledger.wall_s);
      return piece;
    });
    fill(
      this.place,
      make("div", { class: "ledger-bar", "aria-hidden": "true" }, bar),
      make(
        "table",
        { class: "ledger" },
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, make("span", { class: "offscreen" }, "Where")), make("th", { scope: "col", colspan: "2" }, `whole job, ${age(ledger.wall_s)}`), hasHour ? make("th", { scope: "col" }, "last hour") : null)),
        make("tbody", {}, names.map((name) => this.row(name, rows[name] ?? 0, hour[name] ?? 0, ledger, hasHour))),
      ),
    );
  }

  row(name, seconds, hour_s, ledger, hasHour) {
    const [word, means] = ROWS[name];
    return make(
      "tr",
      {},
      make("th", { scope: "row", title: means }, make("span", { class: `swatch row-${name}`, "aria-hidden": "true" }), word, make("span", { class: "means" }, means)),
      make("td", {}, age(seconds)),
      make("td", {}, part(seconds, ledger.wall_s)),
      hasHour ? make("td", {}, part(hour_s, ledger.hour_s)) : null,
    );
  }
}
