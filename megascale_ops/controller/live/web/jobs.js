// SPDX-License-Identifier: Apache-2.0
// All jobs: a few in the head of the page, or only the one on show and a way to all; and the list of all of them, the
// worst first, one line each, searched, filtered and walked by keyboard.

import { OVER } from "./frames.js";
import { LEVEL_WORDS, glyph } from "./verdict.js";
import { age, count, fill, make, say, some } from "./words.js";

// 4 names fit beside each other; more of them would push the verdict off a phone's screen.
const MOST_IN_HEAD = 4;
const isOver = (job) => OVER.includes(job.state);
// What is listed first: what lives and needs a person, then what failed, and last what ended well.
const PLACES = [
  (job) => job.level === "act" && !isOver(job),
  (job) => job.level === "act",
  (job) => job.level === "watch",
  (job) => job.level === "waiting",
  (job) => !isOver(job),
  () => true,
];
const FILTERS = [
  ["all", "all", () => true],
  ["act", "act", (job) => job.level === "act"],
  ["watch", "worth a look", (job) => job.level === "watch"],
  ["running", "running", (job) => !isOver(job)],
  ["over", "over", isOver],
];
const address = (job) => `#job=${encodeURIComponent(job)}`;
const stateOf = (job) => job.state.replaceAll("_", " ");

/** Jobs as they are listed: the worst first, of several that are alike the one that changed last. */
export function worstFirst(jobs) {
  const place = (job) => PLACES.findIndex((is) => is(job));
  return [...jobs].sort((one, other) => place(one) - place(other) || (other.since_wall_s ?? 0) - (one.since_wall_s ?? 0));
}

export class JobsView {
  constructor() {
    this.head = document.getElementById("jobs");
    this.part = document.getElementById("overview");
    this.list = document.getElementById("overview-jobs");
    this.left = document.getElementById("overview-left");
    this.search = document.getElementById("overview-search");
    this.filters = document.getElementById("overview-filters");
    this.filter = "all";
    this.rows = new Map(); // by job: its line and what stands in it
    this.order = "";
    this.shown = "";
    this.known = null;
    this.search.addEventListener("input", () => this.show(this.known));
    this.chips = new Map(
      FILTERS.map(([name]) => {
        const chip = make("button", { type: "button", "data-filter": name });
        chip.addEventListener("click", () => {
          this.filter = name;
          this.show(this.known);
        });
        return [name, chip];
      }),
    );
    fill(this.filters, [...this.chips.values()]);
    addEventListener("keydown", (event) => this.key(event));
  }

  get isOpen() {
    return !this.part.hidden;
  }

  /** Open the list, or close it. */
  open(wanted, known) {
    const isNew = wanted && !this.isOpen;
    this.part.hidden = !wanted;
    if (!wanted) return;
    this.show(known);
    if (isNew) document.getElementById("overview-title").focus();
  }

  /** The head of the page: all jobs where they are few, else the one on show and a way to all. */
  showHead(known, level) {
    this.known = known;
    const { jobs, job: shown } = known;
    const text = JSON.stringify([shown, level, jobs.map((job) => [job.job, job.level, job.state])]);
    if (text === this.shown) return;
    this.shown = text;
    const few = jobs.length <= MOST_IN_HEAD ? jobs : jobs.filter((job) => job.job === shown);
    const others = jobs.filter((job) => job.job !== shown && job.level === "act").length;
    fill(
      this.head,
      few.map((job) =>
        make(
          "a",
          { href: address(job.job), "aria-current": job.job === shown ? "page" : undefined },
          glyph(job.job === shown ? level : job.level),
          make("span", {}, job.job),
          make("span", { class: "offscreen" }, `, ${LEVEL_WORDS[job.level]}, ${stateOf(job)}`),
        ),
      ),
      jobs.length > 1
        ? make("a", { href: "#view=jobs", class: "all" }, others ? glyph("act") : null, make("span", {}, `all ${count(jobs.length)} jobs${others ? `, ${others === 1 ? "another needs" : `${count(others)} others need`} action` : ""}`))
        : null,
    );
  }

  show(known) {
    this.known = known;
    if (!known || !this.isOpen) return;
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = known.jobs.filter((job) => {
      const text = `${job.job} ${stateOf(job)} ${LEVEL_WORDS[job.level]} ${job.what ?? ""}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    for (const [name, word, is] of FILTERS) {
      const chip = this.chips.get(name);
      chip.setAttribute("aria-pressed", String(name === this.filter));
      say(chip, `${word} ${count(found.filter(is).length)}`);
    }
    const listed = worstFirst(found.filter(FILTERS.find(([name]) => name === this.filter)[2]));
    this.put(listed, known);
    const hidden = known.jobs.length - listed.length;
    say(this.left, `${hidden ? `${some(hidden, "job")} not shown. ` : ""}Jobs that ended leave this list after a day, those that failed after a week.`);
  }

  /** Lines are kept from frame to frame: what has the keyboard's focus must not lose it. */
  put(listed, known) {
    const order = listed.map((job) => job.job).join("\n");
    for (const job of listed) {
      if (!this.rows.has(job.job)) this.rows.set(job.job, this.row(job.job));
      const row = this.rows.get(job.job);
      if (row.level !== job.level) {
        row.level = job.level;
        fill(row.glyph, glyph(job.level));
      }
      say(row.what, job.what || stateOf(job));
      if (row.what.title !== row.what.textContent) row.what.title = row.what.textContent;
      row.what.className = job.level === "act" ? "what act" : "what";
      say(row.step, (job.step ?? -1) >= 0 ? `step ${count(job.step)}` : "no step");
      say(row.ranks, some(job.world_size ?? 0, "rank"));
      say(row.since, job.since_wall_s ? `${stateOf(job)} for ${age(Math.max(0, known.wall_s - job.since_wall_s))}` : stateOf(job));
      if (job.job === known.job) row.link.setAttribute("aria-current", "true");
      else row.link.removeAttribute("aria-current");
    }
    if (order === this.order) return;
    this.order = order;
    const focused = document.activeElement;
    fill(this.list, listed.map((job) => this.rows.get(job.job).line));
    if (focused?.closest?.("#overview-jobs") && this.list.contains(focused)) focused.focus();
    for (const name of this.rows.keys()) if (!known.jobs.some((job) => job.job === name)) this.rows.delete(name);
  }

  row(name) {
    const row = { level: "" };
    for (const part of ["glyph", "what", "step", "ranks", "since"]) row[part] = make("span", { class: part === "glyph" ? "sign" : part });
    row.link = make("a", { href: address(name) }, row.glyph, make("span", { class: "name", title: name }, name), row.what, row.step, row.ranks, row.since);
    row.line = make("li", {}, row.link);
    return row;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !document.getElementById("door").hidden) return;
    const isTyping = event.target instanceof HTMLInputElement;
    if (event.key === "/" && !isTyping && (this.known?.jobs.length ?? 0) > 1) {
      event.preventDefault();
      location.hash = "#view=jobs";
      this.open(true, this.known);
      this.search.focus();
      return;
    }
    if (!this.isOpen) return;
    const links = [...this.list.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement);
    const isDown = event.key === "ArrowDown" || (event.key === "j" && !isTyping);
    const isUp = event.key === "ArrowUp" || (event.key === "k" && !isTyping);
    if (isDown || isUp) {
      const next = isDown ? Math.min(links.length - 1, at + 1) : at - 1;
      (links[next] ?? this.search).focus();
    } else if (event.key === "Enter" && isTyping && links.length) links[0].click();
    else if (event.key === "Escape" && isTyping && this.search.value) {
      this.search.value = "";
      this.show(this.known);
    } else if (event.key === "Escape") location.hash = this.known?.job ? address(this.known.job) : "";
    else return;
    event.preventDefault();
  }
}
