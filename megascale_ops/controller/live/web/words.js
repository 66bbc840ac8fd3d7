// SPDX-License-Identifier: Apache-2.0
// Numbers and times as people read them, and elements that hold text: nothing on this page is ever made from markup.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `facts`: attributes, `class`, `on` for events; `children`: nodes or texts, which stay texts. */
export function make(name, facts = {}, ...children) {
  const svg = name === "svg" || name === "path" || name === "circle" || name === "rect";
  const made = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(facts)) {
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (value !== undefined && value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/** Put `children` into `place` instead of what was there. */
export function fill(place, ...children) {
  place.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
}

/** Set a text only when it is another one: what does not change is not laid out again. */
export function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** A count with separators: 12,288. */
export const count = (number) => number.toLocaleString("en-US");

/** `one` or `many` by a count. */
export const some = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** A duration at the precision in which a person thinks of it: 380 ms, 2.41 s, 12 min 5 s, 3 d 4 h. */
export function duration(seconds) {
  if (seconds < 0) return "not known";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(2)} s`;
  return age(seconds);
}

/** The same in whole seconds, for what counts up while one looks at it. */
export function age(seconds) {
  if (seconds < 0) return "not known";
  const whole = Math.floor(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A share in 0..1 as per cent, with the digit that every other place shows; "not known" below 0. */
export function share(part) {
  if (part === undefined || part < 0) return "not known";
  return `${(part * 100).toFixed(1)} %`;
}

/** A sentence with a capital letter, unless it begins with a name: node `gpu-3` is not `Gpu-3`. */
export const begun = (text) =>
  /^(ranks?|nodes?|all|every|no|the) /.test(text) ? text[0].toUpperCase() + text.slice(1) : text;

/** The same sentence, whose numbers stay on one line with their units. */
export const unbroken = (text) => text.replaceAll(/(\d) (%|s|ms|min|h)(?=\W|$)/g, "$1\u00a0$2");

const twice = (number) => String(number).padStart(2, "0");

/** Wall clock seconds as time of day here, with the date when that is not today. */
export function clock(wall_s, seconds = true) {
  const when = new Date(wall_s * 1000);
  const time = `${twice(when.getHours())}:${twice(when.getMinutes())}${seconds ? `:${twice(when.getSeconds())}` : ""}`;
  const today = new Date().toDateString() === when.toDateString();
  return today ? time : `${when.getFullYear()}-${twice(when.getMonth() + 1)}-${twice(when.getDate())} ${time}`;
}

/** The same with its date always, for the machine and for who points at it. */
export function moment(wall_s, seconds = true) {
  const when = new Date(wall_s * 1000);
  return make("time", { datetime: when.toISOString(), title: when.toString() }, clock(wall_s, seconds));
}

/** Day of the month here, for an axis: 25 Nov. */
export const day = (wall_s) => new Date(wall_s * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });

/** Date and time of day here, also of today: 2026-11-25 13:02. */
export function date(wall_s) {
  const when = new Date(wall_s * 1000);
  return `${when.getFullYear()}-${twice(when.getMonth() + 1)}-${twice(when.getDate())} ${twice(when.getHours())}:${twice(when.getMinutes())}`;
}

/** `rank 3`, `ranks 0-2, 5`; of more than eight ranges the rest is counted. */
export function ranks(numbers) {
  const spans = [];
  for (const rank of [...new Set(numbers)].sort((one, other) => one - other)) {
    const last = spans[spans.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank;
    else spans.push([rank, rank]);
  }
  const shown = spans.slice(0, 8).map(([first, last]) => (last > first ? `${first}-${last}` : `${first}`));
  const left = spans.slice(8).reduce((sum, [first, last]) => sum + last - first + 1, 0);
  return `${numbers.length === 1 ? "rank" : "ranks"} ${shown.join(", ")}${left ? ` and ${count(left)} more` : ""}`;
}

/** Whether the controller is on the machine that shows the page. */
export const isHere = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);

/** A command as it works wherever it is typed: without an address it would ask the newest run's own controller. */
export function command(text, token) {
  return `${text} --controller ${location.origin}${token ? " --token-file FILE" : ""}`;
}

/** A command with a button that copies it. */
export function copyable(text) {
  const button = make("button", { class: "copy", type: "button", "aria-label": `Copy: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    const done = await copy(text);
    button.textContent = done ? "Copied" : "Select it by hand";
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  return make("div", { class: "command" }, make("code", {}, text), button);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS browsers keep the clipboard from a page that is not on localhost; selecting still copies.
    const field = make("textarea", { readonly: true, class: "offscreen", "aria-hidden": "true" }, text);
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}
