// SPDX-License-Identifier: Apache-2.0
// The newest self-check of each node of the job: when, what is wrong, what was measured.

import { age, fill, make, moment } from "./words.js";

const STATES = { good: "good", warn: "good, with warnings", bad: "bad", unmeasured: "not measured", waiting: "being checked" };
// As badges of incidents are: what is wrong, what is to be looked at, what is well.
const BADGES = { good: "recovered", warn: "watching", bad: "open", unmeasured: "over", waiting: "watching" };

export class ChecksView {
  constructor() {
    this.part = document.getElementById("checks-part");
    this.place = document.getElementById("checks");
  }

  show(known) {
    this.part.hidden = !known.checks.length;
    if (this.part.hidden || !known.changed.has("checks")) return;
    const unfolded = new Set([...this.place.querySelectorAll("details[open]")].map((one) => one.dataset.key));
    fill(this.place, make("ul", { class: "incidents" }, known.checks.map((one) => this.row(one, known.wall_s, unfolded))));
  }

  row(check, now_s, unfolded) {
    const figures = check.figures ?? [];
    const head = [
      check.wall_s ? moment(check.wall_s) : "",
      make("span", { class: "what" }, check.node),
      make("span", { class: "more" }, check.worst || (check.status === "waiting" ? `for ${age(Math.max(0, now_s - check.wall_s))}` : check.reason ?? "")),
      make("span", { class: `badge ${BADGES[check.status] ?? ""}` }, STATES[check.status] ?? check.status),
    ];
    if (!figures.length) return make("li", {}, make("p", { class: "line" }, head));
    return make(
      "li",
      {},
      make("details", { "data-key": check.node, open: unfolded.has(check.node) }, make("summary", {}, head), make("ul", {}, figures.map((line) => make("li", {}, line)))),
    );
  }
}
