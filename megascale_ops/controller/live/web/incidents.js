// SPDX-License-Identifier: Apache-2.0
// The list of incidents, and the page of one: what happened, what was done, how to take it back, and on what evidence.

import { ask } from "./stream.js";
import { age, command, copyable, count, duration, fill, make, moment, ranks, some } from "./words.js";

// One that is open is suspected alone until something is ordered about it.
const STATES = {
  suspected: "suspected", open: "being mended", recovered: "recovered", ended: "not recovered", harmless: "harmless", watching: "still so", over: "over",
};
// What the culprits left is shown, at least 6 pieces; of the others there may be hundreds, one press away.
const LEAST_SHOWN = 6;
// As many as the feed tells (megascale_ops/controller/live/feed.py): fewer are all that there are.
const PAGE = 50;
const STAGES = [
  ["began", "detected", "noticed"], ["detected", "named", "named"], ["named", "stopped", "ranks stopped"], ["stopped", "formed", "new round"],
  ["formed", "stepped", "first new step"], ["stepped", "caught_up", "caught up"],
];

const badge = (state, isOrdered) => {
  const shown = state === "open" && !isOrdered ? "suspected" : state;
  return make("span", { class: `badge ${shown}` }, STATES[shown] ?? shown);
};

export class IncidentList {
  constructor() {
    this.place = document.getElementById("incidents");
    this.part = document.getElementById("incidents-part");
    this.job = "";
    this.older = []; // what was turned over to, the newest first
    this.isEnd = false;
  }

  show(known) {
    this.part.hidden = !known.whole; // before that nobody knows that nothing has happened
    if (!known.changed.has("incidents")) return;
    if (known.job !== this.job) {
      this.job = known.job;
      this.older = [];
      this.isEnd = false;
    }
    if (!known.incidents.length) {
      fill(this.place, make("p", { class: "hint" }, "Nothing has happened to this job."));
      return;
    }
    const listed = new Set(known.incidents.map((one) => one.id));
    const rows = [...known.incidents, ...this.older.filter((one) => !listed.has(one.id))];
    const more = known.incidents.length < PAGE || this.isEnd ? null : make("button", { type: "button", class: "rest" }, "Show older ones");
    more?.addEventListener("click", () => this.turnOver(known, rows[rows.length - 1].id, more));
    fill(this.place, make("ul", { class: "incidents" }, rows.map((incident) => this.row(incident))), more);
  }

  /** Ask for the page of incidents before the oldest one that is shown. */
  async turnOver(known, before, more) {
    more.disabled = true;
    const job = this.job;
    const query = new URLSearchParams({ job, before, limit: String(PAGE) });
    const answer = await ask(`/v1/incidents?${query}`).catch(() => null);
    const found = answer?.ok ? await answer.json().catch(() => null) : null;
    if (this.job !== job) return;
    if (found) {
      this.older.push(...(found.incidents ?? []).reverse().map(lineOf));
      this.isEnd = !found.older;
    }
    known.changed.add("incidents");
    this.show(known);
  }

  row(incident) {
    const facts = [];
    if ((incident.nodes ?? []).length) facts.push(incident.nodes.join(", "));
    if ((incident.recovered_s ?? -1) >= 0) facts.push(`training again after ${duration(incident.recovered_s)}`);
    if (incident.course) facts.push(incident.course);
    if ((incident.steps_lost ?? -1) > 0) facts.push(`${some(incident.steps_lost, "step")} lost`);
    return make(
      "li",
      {},
      make(
        "a",
        { href: `#incident=${encodeURIComponent(incident.id)}` },
        incident.began_wall_s ? moment(incident.began_wall_s) : make("time", {}),
        make("span", { class: "what" }, incident.what || incident.id),
        make("span", { class: "more" }, facts.join(" · ")),
        badge(incident.state, incident.is_ordered),
      ),
    );
  }
}

/** An incident of the journal, as the feed tells newer ones. */
function lineOf(incident) {
  const marks = incident.marks ?? {};
  const began = marks.began || marks.detected || 0;
  const verdict = incident.verdict ?? null;
  const both = Math.min(incident.step_before ?? -1, incident.step_after ?? -1) >= 0;
  const who = verdict?.culprits?.length ? ` (${ranks(verdict.culprits)})` : "";
  return {
    id: incident.id,
    state: incident.state ?? "open",
    what: verdict ? `${verdict.fault.replaceAll("_", " ")}${who}` : "Not judged yet",
    nodes: verdict?.nodes ?? [],
    began_wall_s: began,
    recovered_s: marks.stepped && began ? marks.stepped - began : -1,
    is_ordered: (marks.ordered ?? 0) > 0,
    steps_lost: both ? Math.max(0, incident.step_before - incident.step_after) : -1,
  };
}

export class IncidentPage {
  constructor(hasToken) {
    this.place = document.getElementById("incident");
    this.hasToken = hasToken;
    this.id = "";
  }

  /** Show one incident; asked for anew whenever the feed says that it has changed. */
  async open(id, known) {
    const isNew = id !== this.id;
    this.id = id;
    this.known = known;
    if (isNew) fill(this.place, make("p", { class: "hint" }, "Reading the incident …"));
    const answer = await ask(`/v1/incidents/${encodeURIComponent(id)}`).catch(() => null);
    if (this.id !== id) return;
    const found = answer ? await answer.json().catch(() => ({})) : {};
    if (!answer || !answer.ok) {
      const why = found.error ?? "the controller does not answer";
      fill(this.place, back(), make("h1", {}, id), make("p", { class: "wrong" }, `It can't be shown: ${why}.`));
      return;
    }
    this.line = JSON.stringify(known.incidents.find((one) => one.id === id) ?? null);
    const unfolded = new Set([...this.place.querySelectorAll("details[open]")].map((one) => one.dataset.key));
    this.fillWith(found, unfolded);
    if (isNew) this.place.querySelector("h1")?.focus();
  }

  /** Look whether the incident on show has changed. */
  show(known) {
    if (!this.id || this.place.hidden) return;
    const line = JSON.stringify(known.incidents.find((one) => one.id === this.id) ?? null);
    if (line !== this.line) this.open(this.id, known);
  }

  close() {
    this.id = "";
    fill(this.place);
  }

  fillWith(incident, unfolded) {
    const verdict = incident.verdict ?? null;
    const line = this.known.incidents.find((one) => one.id === incident.id) ?? {};
    const marks = incident.marks ?? {};
    const began = marks.began || marks.detected || 0;
    const facts = [
      ["Who", verdict?.culprits?.length ? `${ranks(verdict.culprits)}${verdict.nodes?.length ? ` on ${verdict.nodes.join(", ")}` : ""}` : verdict?.nodes?.join(", ")],
      ["Since", began ? moment(began) : ""],
      ["Step", (incident.step_before ?? -1) >= 0 ? count(incident.step_before) : ""],
      ["Class", verdict?.fault?.replaceAll("_", " ")],
      ["Cause", verdict?.cause],
      ["Own work", verdict?.excess ? `${(verdict.excess * 100).toFixed(1)} % above its equals` : ""],
      ["Cost", verdict?.cost ? `${(verdict.cost * 100).toFixed(1)} % of every step` : ""],
      ["Confidence", verdict ? `${Math.round((verdict.confidence ?? 0) * 100)} %${verdict.sure_of === "place" ? " of who and where, not of a hang: it may go on by itself" : ""}` : ""],
      ["Course", line.course],
      ["Job", `${incident.job}, round ${incident.round ?? 0}`],
      ["Files", incident.folder],
    ];
    fill(
      this.place,
      back(),
      make("p", { class: "over" }, incident.id, " ", badge(incident.state ?? "open", (incident.marks?.ordered ?? 0) > 0)),
      make("h1", { tabindex: "-1" }, line.what || verdict?.fault?.replaceAll("_", " ") || "Not judged yet"),
      verdict?.reason ? make("p", { class: "reason" }, verdict.reason) : null,
      make("dl", { class: "facts-list" }, facts.filter(([, value]) => value).map(([name, value]) => make("div", { class: ["Files", "Course"].includes(name) ? "whole" : undefined }, make("dt", {}, name), make("dd", {}, value)))),
      this.times(marks, incident),
      make("h2", {}, "What was done"),
      make("p", {}, incident.done || "Nothing so far."),
      line.undo ? make("p", { class: "undo" }, line.undo) : null,
      line.undo_command ? copyable(command(line.undo_command, this.hasToken())) : null,
      make("h2", {}, "Next"),
      copyable(command(`megascale-ops why ${incident.id}`, this.hasToken())),
      verdict?.culprits?.length ? make("p", { class: "rest" }, make("a", { href: `#log=${verdict.culprits[0]}&incident=${encodeURIComponent(incident.id)}&round=${incident.round ?? 0}` }, `What rank ${count(verdict.culprits[0])} printed`)) : null,
      this.evidence(incident, verdict, unfolded),
      this.events(incident, unfolded),
    );
  }

  times(marks, incident) {
    const start = marks.began || marks.detected;
    const parts = [];
    let before = start;
    for (const [, until, word] of STAGES) {
      const at = marks[until];
      if (!at || !before) continue;
      parts.push([word, Math.max(0, at - before), Math.max(0, at - start)]);
      before = at;
    }
    if (!parts.length) return null;
    const whole = Math.max(0.001, before - start);
    const lost = Math.min(incident.step_before ?? -1, incident.step_after ?? -1) >= 0 ? Math.max(0, incident.step_before - incident.step_after) : -1;
    const bars = parts.map(([word, took], at) => {
      const bar = make("span", { class: `stage stage-${at % 6}`, title: `${word}: ${duration(took)}` });
      bar.style.flexGrow = String(Math.max(0.004, took / whole));
      return bar;
    });
    return make(
      "div",
      { class: "stages" },
      make("div", { class: "bars", "aria-hidden": "true" }, bars),
      make("ol", {}, parts.map(([word, , after], at) => make("li", {}, make("span", { class: `swatch stage-${at % 6}`, "aria-hidden": "true" }), make("b", {}, word), ` after ${duration(after)}`)), lost > 0 ? make("li", {}, `${some(lost, "step")} made twice`) : null),
    );
  }

  evidence(incident, verdict, unfolded) {
    const culprits = new Set(verdict?.culprits ?? []);
    const items = [...(incident.evidence ?? [])];
    const weight = (item) => (culprits.has(item.rank) ? 0 : 2) + (item.ok ? 0 : 1);
    items.sort((one, other) => weight(one) - weight(other));
    const shown = Math.max(LEAST_SHOWN, items.filter((item) => culprits.has(item.rank)).length);
    const findings = verdict?.evidence ?? [];
    const list = make("div", { class: "evidence" }, items.slice(0, shown).map((item) => piece(item, culprits, unfolded)));
    const left = items.slice(shown);
    const more = left.length ? make("button", { type: "button", class: "rest" }, `Show ${some(left.length, "more piece", "more pieces")}, of ${culprits.size ? "the other ranks" : "other ranks"}`) : null;
    more?.addEventListener("click", () => {
      list.append(...left.map((item) => piece(item, culprits, unfolded)));
      more.remove();
    });
    return [
      make("h2", {}, "Evidence"),
      findings.length ? make("ul", { class: "findings" }, findings.map((one) => make("li", {}, make("b", {}, one.source), ` ${one.text}`))) : null,
      items.length ? list : findings.length ? null : make("p", { class: "hint" }, "None was gathered."),
      more,
      verdict?.otherwise ? make("p", { class: "reason" }, make("span", { class: "label" }, "What would have changed the verdict: "), verdict.otherwise) : null,
    ];
  }

  events(incident, unfolded) {
    const events = incident.events ?? [];
    if (!events.length) return null;
    return make(
      "details",
      { class: "events", "data-key": "events", open: unfolded.has("events") },
      make("summary", {}, `Journal: ${some(events.length, "event")}`),
      make("ol", {}, events.map((one) => make("li", {}, moment(one.wall_s), make("b", {}, one.kind.replaceAll("_", " ")), ` ${one.text ?? ""}`))),
    );
  }
}

const back = () => make("p", { class: "back" }, make("a", { href: "#" }, "← Back to the job"));

function piece(item, culprits, unfolded) {
  const key = `${item.kind}|${item.rank ?? -1}|${item.path ?? ""}`;
  const rank = item.rank ?? -1;
  const head = [make("b", {}, item.kind.replaceAll("_", " ")), rank >= 0 ? ` of rank ${count(rank)}` : ""];
  if (culprits.has(rank)) head.push(make("span", { class: "badge culprit" }, "culprit"));
  const first = item.frames?.[0] ?? (item.text ?? "").split("\n").find((line) => line.trim()) ?? (item.ok ? "" : "no answer");
  const words = (item.marks ?? []).map((mark) => mark.replaceAll("_", " "));
  return make(
    "details",
    { "data-key": key, open: unfolded.has(key) },
    make("summary", {}, head, make("span", { class: "first" }, first)),
    words.length ? make("p", {}, words.join(", ")) : null,
    item.frames?.length && !item.text ? make("pre", {}, item.frames.join("\n")) : null,
    item.text ? make("pre", {}, item.text) : null,
    item.collectives?.length ? make("pre", {}, item.collectives.map(collective).join("\n")) : null,
    item.path ? copyable(`less ${item.path}`) : null,
    item.took_s ? make("p", { class: "hint" }, `taken in ${age(item.took_s) === "0 s" ? duration(item.took_s) : age(item.took_s)}`) : null,
  );
}

const collective = (one) => [`${one.group} #${one.seq}`, one.function, one.sizes, one.dtype, one.done ? "done" : "not done"].filter(Boolean).join(" ");
