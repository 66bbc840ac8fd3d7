// SPDX-License-Identifier: Apache-2.0
// The job's nodes that are not simply healthy as machines: where each stands, until when, why, and what may be typed.

import { command, copyable, fill, make, moment } from "./words.js";

export class NodesView {
  constructor(hasToken) {
    this.part = document.getElementById("nodes-part");
    this.list = document.getElementById("nodes");
    this.hasToken = hasToken;
  }

  show(known) {
    if (!known.changed.has("lives")) return;
    const lives = known.lives ?? [];
    this.part.hidden = !lives.length;
    fill(this.list, ...lives.map((life) => this.line(life)));
  }

  line(life) {
    const until = life.state === "healthy" ? "" : life.until_wall_s > 0 ? `until ${moment(life.until_wall_s, false)}` : "until a person ends it";
    return make(
      "li",
      {},
      make("p", {}, make("strong", {}, life.node), ` is ${life.state} ${until}${life.by ? `, by ${life.by}` : ""}`),
      make("p", { class: "hint" }, life.means ?? ""),
      make("p", {}, life.reason ?? ""),
      life.engine ? make("p", {}, life.engine) : "",
      copyable(command(life.command, this.hasToken())),
    );
  }
}
