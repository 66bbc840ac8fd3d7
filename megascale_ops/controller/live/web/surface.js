// SPDX-License-Identifier: Apache-2.0
// Two canvases over each other: what is drawn once a second, and what follows the pointer. Colours come from the style
// sheet, so that light and dark are decided in one place.

export class Surface {
  /** `name`: id of the lower canvas; the upper one is `name`-over. `redraw` is called when size or colours change. */
  constructor(name, redraw) {
    this.frame = document.getElementById(`${name}-frame`);
    this.under = document.getElementById(name);
    this.over = document.getElementById(`${name}-over`);
    this.shades = {};
    this.seen = 0;
    const again = () => {
      this.shades = {};
      redraw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    new ResizeObserver(() => {
      if (this.frame.clientWidth !== this.seen) again();
    }).observe(this.frame);
  }

  width() {
    return Math.max(120, this.frame.clientWidth);
  }

  /** Wipe the lower canvas, `height` high from now on; returns its brush, in CSS pixels. */
  begin(height) {
    this.height = Math.max(1, Math.ceil(height));
    this.seen = this.frame.clientWidth; // not where the upper one is wiped: that may be before the observer tells of a new size
    return this.wipe(this.under);
  }

  beginOver() {
    return this.wipe(this.over);
  }

  wipe(canvas) {
    const scale = devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width() * scale), Math.round(this.height * scale)];
    const brush = canvas.getContext("2d");
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
      canvas.style.height = `${this.height}px`;
    }
    brush.setTransform(scale, 0, 0, scale, 0, 0);
    brush.clearRect(0, 0, this.width(), this.height);
    return brush;
  }

  /** Colours of the style sheet by name. */
  colours(names) {
    const style = getComputedStyle(document.documentElement);
    for (const name of names) this.shades[name] ??= style.getPropertyValue(`--${name}`).trim();
    return this.shades;
  }

  font(pixels) {
    return `${pixels}px ${getComputedStyle(document.body).fontFamily}`;
  }

  /** What to do when a pointer or a key comes; `act.key` answers whether the key was meant for it. */
  on(act) {
    const where = (event) => {
      const box = this.over.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.over.addEventListener("pointermove", (event) => event.pointerType === "mouse" && act.move(...where(event)));
    this.over.addEventListener("pointerleave", () => act.leave());
    this.over.addEventListener("click", (event) => act.press(...where(event)));
    this.over.addEventListener("focus", () => this.over.matches(":focus-visible") && act.focus());
    this.over.addEventListener("keydown", (event) => {
      if (!event.ctrlKey && !event.metaKey && !event.altKey && act.key(event.key)) event.preventDefault();
    });
  }
}
