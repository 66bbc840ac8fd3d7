// SPDX-License-Identifier: Apache-2.0
// What one rank printed: the end of its newest file, followed; searched in the file, not only in what is shown. Lines that
// an incident rests on are marked. Asked for only while it is on show; it is text, and never read as anything else.

import { ask } from "./stream.js";
import { fill, make, say, some } from "./words.js";

// 1 s, as frames come.
const EVERY_MS = 1000;
// 5 s until what could not be read is asked for again: an agent that is away for a moment, a rank that has not printed yet.
const AGAIN_MS = 5000;
const MAY_COME = [404, 409];
// 2,000 lines on the page, 200 at the beginning; of an incident 1,000, for the rank may have printed on. What is older is in the file.
const MOST_SHOWN = 2000;
const FIRST = 200;
const MOST_ASKED = 1000;
// Shorter lines ("}", "done") stand anywhere.
const LEAST_MARKED = 8;

export class LogView {
  constructor() {
    this.part = document.getElementById("log");
    this.list = document.getElementById("log-lines");
    this.state = document.getElementById("log-state");
    this.title = document.getElementById("log-title");
    this.rank = document.getElementById("log-rank");
    this.stream = document.getElementById("log-stream");
    this.round = document.getElementById("log-round");
    this.search = document.getElementById("log-search");
    this.follows = document.getElementById("log-follows");
    this.wanted = null;
    this.turn = 0;
    for (const field of [this.rank, this.stream, this.round]) field.addEventListener("change", () => this.begin());
    this.search.addEventListener("input", () => {
      clearTimeout(this.typed);
      this.typed = setTimeout(() => this.begin(), 300);
    });
    this.follows.addEventListener("change", () => this.begin());
    document.getElementById("log-form").addEventListener("submit", (event) => event.preventDefault());
  }

  get isOpen() {
    return !this.part.hidden;
  }

  /** Show a rank's log from now on; null closes the view. `wanted`: job, rank, round (-1: the newest), incident. */
  open(wanted) {
    this.part.hidden = !wanted;
    this.turn += 1;
    clearTimeout(this.next);
    if (!wanted) return;
    this.wanted = wanted;
    document.getElementById("log-back").href = wanted.incident ? `#incident=${encodeURIComponent(wanted.incident)}` : `#job=${encodeURIComponent(wanted.job)}`;
    this.rank.value = String(wanted.rank);
    this.search.value = "";
    this.rounds([], wanted.round);
    this.evidence = null;
    this.reason = "";
    this.title.focus();
    this.begin();
  }

  /** Forget what is shown, and ask anew. */
  async begin() {
    this.turn += 1;
    const turn = this.turn;
    clearTimeout(this.next);
    this.after = 0;
    this.isFirst = true;
    if (this.wanted.incident && !this.evidence) await this.learn(this.wanted.incident);
    if (turn === this.turn) this.read(turn);
  }

  /** What an incident rests on: lines of evidence by rank, and words of the verdict. */
  async learn(id) {
    const answer = await ask(`/v1/incidents/${encodeURIComponent(id)}`).catch(() => null);
    const incident = answer?.ok ? await answer.json().catch(() => null) : null;
    this.evidence = new Set();
    for (const item of incident?.evidence ?? []) for (const line of (item.text ?? "").split("\n")) this.evidence.add(`${item.rank ?? -1} ${line.trim()}`);
    this.reason = `${incident?.verdict?.reason ?? ""} ${incident?.verdict?.cause ?? ""}`;
  }

  async read(turn) {
    const query = new URLSearchParams({ rank: String(Math.max(0, Math.floor(Number(this.rank.value) || 0))), stream: this.stream.value, round: this.round.value || "-1", after: String(this.after), lines: String(this.isFirst && !this.wanted.incident ? FIRST : MOST_ASKED) });
    if (this.search.value) query.set("grep", this.search.value);
    const answer = document.hidden ? null : await ask(`/v1/jobs/${encodeURIComponent(this.wanted.job)}/logs?${query}`).catch(() => null);
    const found = answer ? await answer.json().catch(() => ({})) : null;
    if (turn !== this.turn) return;
    if (answer?.ok && !this.isFirst && found.round !== this.shown) {
      // A restart: the newest round is another one, and another file, read from its beginning.
      this.begin();
      return;
    }
    if (answer?.ok) this.show(found);
    else if (found) {
      fill(this.list);
      say(this.state, `${found.error ?? "the controller does not answer"}.`);
      this.state.classList.add("wrong");
    }
    if (!this.follows.checked) return;
    // A silent controller is asked again, and so is what may be there later; what is not allowed stays so.
    if (!found || answer.ok) this.next = setTimeout(() => this.read(turn), EVERY_MS);
    else if (MAY_COME.includes(answer.status)) this.next = setTimeout(() => this.begin(), AGAIN_MS);
  }

  show(found) {
    const lines = found.lines ?? [];
    const isAtEnd = this.list.scrollTop + this.list.clientHeight >= this.list.scrollHeight - 30;
    const made = lines.map((line) => make("li", { class: this.isMarked(line) ? "marked" : undefined }, line || " "));
    this.after = found.end ?? 0;
    this.shown = found.round;
    if (this.isFirst || found.is_anew) fill(this.list, made);
    else this.list.append(...made);
    while (this.list.children.length > MOST_SHOWN) this.list.firstChild.remove();
    if (this.isFirst) this.rounds(found.rounds ?? [], found.round);
    const marked = this.list.querySelector(".marked");
    if (this.isFirst && marked) marked.scrollIntoView({ block: "center" });
    else if (this.isFirst || isAtEnd) this.list.scrollTop = this.list.scrollHeight;
    if (this.isFirst) this.isCut = found.is_cut;
    this.isFirst = false;
    const count = this.list.querySelectorAll(".marked").length;
    const what = this.search.value ? some(this.list.children.length, "line holds this text", "lines hold this text") : some(this.list.children.length, "line");
    this.state.classList.remove("wrong");
    say(this.state, `${what}${found.node ? ` on node ${found.node}` : ""}${this.isCut ? ", earlier ones are in the file (megascale-ops logs)" : ""}${count ? `; ${some(count, "line")} marked that the incident rests on` : ""}.`);
  }

  isMarked(line) {
    const text = line.trim();
    return text.length >= LEAST_MARKED && (this.evidence?.has(`${this.rank.value} ${text}`) || this.reason.includes(text));
  }

  rounds(known, chosen) {
    const all = known.length ? known : chosen >= 0 ? [chosen] : [];
    fill(this.round, make("option", { value: "-1" }, "newest"), all.map((one) => make("option", { value: String(one) }, String(one))));
    // Who asked for the newest keeps that: a restart begins another one.
    this.round.value = this.wanted.round >= 0 && chosen >= 0 ? String(chosen) : "-1";
  }
}
