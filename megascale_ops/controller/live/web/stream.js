// SPDX-License-Identifier: Apache-2.0
// The live feed: server-sent events read through fetch, because EventSource can't carry a token. It comes back by
// itself after whatever happened, and always knows when the controller was last heard.

const KEY = "megascale-ops token";
// 0.5 s, doubled up to 8 s: a controller that is restarted is back on the page within seconds.
const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;
// 5 s without a byte, although one frame a second is due: the connection is dead without having said so.
const SILENT_MS = 5000;

/** The token of this tab; gone with it. */
export const token = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Fetch with the token. */
export function ask(path, more = {}) {
  const known = token.get();
  return fetch(path, { ...more, cache: "no-store", headers: known ? { Authorization: `Bearer ${known}` } : {} });
}

export class Stream {
  /** `on.frame(frame, began_ms, isHeadline)`: a frame, or the headline of the one to come; `on.wanted(why)` for a token (why: what is wrong with the one that was given), `on.trouble(sentence)` when an answer is no stream. */
  constructor(on) {
    this.on = on;
    this.heard_ms = performance.now();
    this.trouble = "";
    this.turn = 0;
  }

  /** Watch a job ("" lets the controller choose) from now on, and no other. */
  async watch(job) {
    this.turn += 1;
    const turn = this.turn;
    this.stop?.abort();
    let pause_ms = FIRST_PAUSE_MS;
    while (turn === this.turn) {
      const before_ms = this.heard_ms;
      try {
        if (!(await this.read(job, turn))) return;
      } catch (error) {
        // A connection that broke or was given up: that it is not heard is said anyway.
        if (error.name !== "AbortError" && !(error instanceof TypeError)) throw error;
      }
      if (turn !== this.turn) return;
      pause_ms = this.heard_ms > before_ms ? FIRST_PAUSE_MS : Math.min(LONGEST_PAUSE_MS, pause_ms * 2);
      await new Promise((go) => setTimeout(go, pause_ms));
    }
  }

  /** Read one connection to its end; false when only a person can help. */
  async read(job, turn) {
    this.stop = new AbortController();
    const stop = this.stop;
    const wish = `headline=first${job ? `&job=${encodeURIComponent(job)}` : ""}`;
    const answer = await ask(`/v1/live?${wish}`, { signal: stop.signal });
    if (answer.status === 401) {
      // What is wrong with a token (another controller's, one whose time is over) the controller says.
      const why = token.get() ? ((await answer.json().catch(() => ({}))).error ?? "it is not valid here") : "";
      token.forget();
      this.on.wanted(why);
      return false;
    }
    if (!answer.ok) {
      this.trouble = (await answer.json().catch(() => ({}))).error ?? `the controller answers with ${answer.status}`;
      this.on.trouble(this.trouble);
      return true;
    }
    this.trouble = "";
    const reader = answer.body.getReader();
    const letters = new TextDecoder();
    let text = "";
    let watchdog = 0;
    try {
      for (;;) {
        clearTimeout(watchdog);
        watchdog = setTimeout(() => stop.abort(), SILENT_MS);
        const { value, done } = await reader.read();
        if (done || turn !== this.turn) return true;
        // An end can't lie before what is new, but for its first letter: a whole frame comes in many pieces.
        const since = Math.max(0, text.length - 1);
        text += letters.decode(value, { stream: true });
        for (let end = text.indexOf("\n\n", since); end >= 0; end = text.indexOf("\n\n")) {
          this.event(text.slice(0, end));
          text = text.slice(end + 2);
        }
      }
    } finally {
      clearTimeout(watchdog);
      reader.cancel().catch(() => {});
    }
  }

  event(text) {
    const lines = text.split("\n");
    const data = lines.find((line) => line.startsWith("data: "));
    if (!data) return;
    const began_ms = performance.now();
    const frame = JSON.parse(data.slice(6));
    this.heard_ms = began_ms;
    this.on.frame(frame, began_ms, lines.includes("event: headline"));
  }
}
