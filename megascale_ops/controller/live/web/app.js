// SPDX-License-Identifier: Apache-2.0
// The live page: one stream of frames, and views that each take what has changed. The address says what is shown:
// #job=NAME for a job, #incident=ID for an incident, #log=RANK (with job, incident or round) for what a rank printed,
// #view=jobs for the list of all jobs, nothing for the job that needs a look most. A token may come along as #token=TOKEN: what stands behind the # is sent to nobody.

import { ChecksView } from "./checks.js";
import { Known, OVER } from "./frames.js";
import { IncidentList, IncidentPage } from "./incidents.js";
import { JobsView } from "./jobs.js";
import { LedgerView } from "./ledger.js";
import { LogView } from "./logs.js";
import { MapView } from "./map.js";
import { Stream, token } from "./stream.js";
import { TimesView } from "./times.js";
import { NodesView } from "./nodes.js";
import { PaceView, VerdictView } from "./verdict.js";
import { age, isHere, say } from "./words.js";

// 3 s: one frame a second is due; two may be late when the controller has much to do.
const UNHEARD_MS = 3000;
const SIGNS = { calm: "●", watch: "▲", act: "■", waiting: "○", over: "✓" };
const part = (name) => document.getElementById(name);

const known = new Known();
// A token that came in the address on this machine is a run's own: its verbs find that by themselves.
const hasToken = () => token.get() !== "" && !(isHere && token.get().startsWith("mo1."));
const verdict = new VerdictView(hasToken);
const pace = new PaceView();
const map = new MapView();
const times = new TimesView();
const ledger = new LedgerView();
const nodes = new NodesView(hasToken);
const checks = new ChecksView();
const jobs = new JobsView();
const list = new IncidentList();
const page = new IncidentPage(hasToken);
const log = new LogView();
let frames = 0;
let waiting = new Set(); // parts that changed since the page was drawn

const stream = new Stream({
  frame: (frame, began_ms, isHeadline) => {
    known.take(frame);
    frames += 1;
    for (const name of known.changed) waiting.add(name);
    showJobs();
    // Nobody looks: only the tab's title is kept true.
    if (document.hidden) return;
    draw();
    measure(began_ms, isHeadline);
  },
  wanted: (why) => {
    part("page").hidden = true;
    part("overview").hidden = true;
    part("log").hidden = true;
    part("door").hidden = false;
    part("door-wrong").hidden = !why;
    say(part("door-wrong"), `That is not this controller's token: ${why}`);
    say(part("heard-text"), "waiting for a token");
    part("door-token").value = "";
    part("door-token").focus();
  },
  trouble: (sentence) => trouble(sentence),
});

/** Draw what has changed; one thing that can't be drawn must not take the verdict with it. */
function draw() {
  const views = [];
  known.changed = waiting;
  waiting = new Set();
  if (known.changed.has("headline")) views.push(verdict);
  if (known.changed.has("pace")) views.push(pace);
  if (known.changed.size) views.push(map, times, ledger, nodes, checks, list, page, jobs);
  part("page").hidden = Boolean(page.id) || jobs.isOpen || log.isOpen;
  part("door").hidden = true;
  for (const view of views) {
    try {
      view.show(known);
    } catch (error) {
      console.error(error);
    }
  }
  tick();
}

/** Note how long a frame took from its last byte to what is painted: the newest, and what had the first verdict. */
function measure(began_ms, isHeadline) {
  const detail = frames;
  requestAnimationFrame(() => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      const span = { start: began_ms, end: performance.now(), detail };
      const note = (name) => performance.getEntriesByName(name).length || performance.measure(name, span);
      note("verdict");
      if (!isHeadline) {
        note("whole");
        performance.clearMeasures("frame");
        note("frame");
      }
      port1.close();
    };
    port2.postMessage(0);
  });
}

function showJobs() {
  const level = known.headline?.level ?? "waiting";
  const title = `${SIGNS[level] ?? ""} ${known.job || "MegaScale Ops"}: ${known.headline?.sentence ?? ""}`;
  if (title !== document.title) document.title = title;
  jobs.showHead(known, level);
}

/** Let time pass: what counts up, and whether the controller is heard. */
function tick() {
  const silent_ms = performance.now() - stream.heard_ms;
  // A run's own controller ends with its job: nothing is amiss, and nothing more will come.
  const isOver = OVER.includes(known.pace?.state);
  const isUnheard = silent_ms > UNHEARD_MS && !isOver;
  document.body.classList.toggle("unheard", isUnheard);
  if (!part("door").hidden) return;
  if (isUnheard) {
    say(part("heard-text"), stream.trouble ? "no live feed" : `controller not heard for ${age(silent_ms / 1000)}`);
    trouble(stream.trouble || "The controller is not heard. What is shown is what it last said; training goes on without it.");
    return;
  }
  trouble("");
  if (silent_ms > UNHEARD_MS) {
    say(part("heard-text"), "the job is over, and so is its controller");
    return;
  }
  const lag = known.lag_s > 0.5 ? `, it lags ${known.lag_s.toFixed(1)} s behind` : "";
  say(part("heard-text"), frames ? `live${lag}` : "connecting");
  const passed_s = silent_ms / 1000;
  verdict.tick(known.wall_s + passed_s);
  pace.tick(passed_s);
}

function trouble(sentence) {
  part("trouble").hidden = !sentence;
  say(part("trouble"), sentence);
}

/** What the address says: an incident, all jobs, and a job ("": the one that needs a look most). */
function wanted() {
  const said = new URLSearchParams(location.hash.slice(1));
  const incident = said.get("incident") ?? "";
  const job = said.get("job") ?? incident.replace(/-\d+$/, "");
  const log = /^\d+$/.test(said.get("log") ?? "") ? { job, rank: Number(said.get("log")), round: Number(said.get("round") ?? -1), incident } : null;
  return { incident: log ? "" : incident, log, all: said.get("view") === "jobs" && !incident && !log, job };
}

/** Take a token that the address carries, and take it out of there: history and copied addresses shall not hold it. */
function takeToken() {
  const said = new URLSearchParams(location.hash.slice(1));
  const given = said.get("token");
  if (!given) return false;
  token.set(given);
  said.delete("token");
  const left = said.toString();
  history.replaceState(null, "", location.pathname + location.search + (left && `#${left}`));
  return true;
}

/** Show what the address says. */
function route() {
  const isNew = takeToken();
  const { incident, log: logged, all, job } = wanted();
  if (incident) page.open(incident, known);
  else page.close();
  part("incident").hidden = !incident;
  jobs.open(all, known);
  log.open(logged);
  part("page").hidden = Boolean(incident || logged) || all || !frames;
  if (isNew || !frames || (job && job !== known.job)) stream.watch(job);
  if (incident || logged || all) scrollTo(0, 0);
}

part("door").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(part("door-token").value.trim());
  stream.watch(wanted().job || known.job);
});
addEventListener("hashchange", route);
setInterval(tick, 1000);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  if (waiting.size) draw();
  tick();
});
route();
