// SPDX-License-Identifier: Apache-2.0
// Draws the heat maps and the step-time curve of a report from the numbers that stand in the page. No request leaves it.
"use strict";
(function () {
  const holder = document.getElementById("plot-data");
  const plot = document.getElementById("plot");
  const done = () => { document.documentElement.dataset.height = document.documentElement.scrollHeight; };
  if (!holder || !plot || !window.Plotly) { done(); return; }
  const data = JSON.parse(holder.textContent);

  const unpack = (packed) => {
    const bytes = Uint8Array.from(atob(packed.f4), (char) => char.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Array.from({ length: packed.rows }, (_, row) =>
      Array.from({ length: packed.columns }, (_, column) => {
        const value = view.getFloat32(4 * (row * packed.columns + column), true);
        return Number.isNaN(value) ? null : value;
      }));
  };
  const grids = { late: unpack(data.late), step: unpack(data.step), own: unpack(data.own), waiting: unpack(data.waiting) };
  const rows = data.labels.length;
  const middles = data.reached.map((_, i) => (data.edges[i] + data.edges[i + 1]) / 2);
  const duration = (seconds) => seconds === null ? "?" : Math.abs(seconds) < 1
    ? (seconds * 1000).toFixed(Math.abs(seconds) < 0.01 ? 1 : 0) + " ms" : seconds.toFixed(2) + " s";

  // Pixels: a row of a small job is as tall as its label, thousands of rows share 620.
  const tall = Math.max(110, Math.min(620, rows * 20));
  // On a phone the legend stands below the curve, and headings are short: beside each other they cover themselves.
  const narrow = plot.clientWidth < 600;
  const curve = 170, gap = 62, top = 66, bottom = narrow ? 84 : 44;
  const height = top + tall + gap + tall + gap + curve + bottom;
  const inner = height - top - bottom;
  const part = (from, size) => [1 - (from + size) / inner, 1 - from / inner];
  const every = Math.ceil(rows / (tall / 13));
  const ticks = data.labels.map((_, i) => i).filter((i) => data.keep.includes(i) ||
    (i % every === 0 && !data.keep.some((kept) => Math.abs(kept - i) < every)));

  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const scales = () => dark.matches
    ? { late: [[0, "#20262e"], [0.3, "#6b3a12"], [0.6, "#d9731a"], [1, "#ffe2a8"]],
        step: [[0, "#20262e"], [0.35, "#1f5673"], [0.7, "#3fa7c9"], [1, "#e6fbff"]] }
    : { late: [[0, "#eef0f3"], [0.3, "#fcd9a4"], [0.6, "#ec7d1f"], [1, "#7f1d0c"]],
        step: [[0, "#eef0f3"], [0.35, "#a8d5e5"], [0.7, "#2d87ad"], [1, "#0a2f45"]] };
  const ink = () => getComputedStyle(document.documentElement).getPropertyValue("--ink").trim();
  const line = () => getComputedStyle(document.documentElement).getPropertyValue("--line").trim();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const heat = (grid, range, axis, y, scale) => ({
    type: "heatmap", x: data.edges, y: data.labels.map((_, i) => i), z: grid, zmin: range[0], zmax: range[1],
    colorscale: scale, xaxis: "x", yaxis: axis, hoverinfo: "none", hoverongaps: false, ygap: rows <= 32 ? 2 : 0,
    colorbar: { tickformat: "~s", ticksuffix: "s", nticks: 5, thickness: narrow ? 7 : 11, len: tall / inner, y, yanchor: "middle", outlinewidth: 0 },
  });
  const first = part(0, tall), second = part(tall + gap, tall), third = part(2 * (tall + gap), curve);
  const center = (domain) => (domain[0] + domain[1]) / 2;
  const heading = (text, domain) => ({
    text: "<b>" + text + "</b>", x: 0, xref: "paper", xanchor: "left", y: domain[1], yref: "paper", yanchor: "bottom",
    showarrow: false, font: { size: 13 }, yshift: 2,
  });
  // Names of incidents that stand close to each other take turns on two lines.
  const late = data.edges[0] + 0.85 * (data.edges[data.edges.length - 1] - data.edges[0]);
  const named = () => data.marks.map((mark, i) => ({
    text: mark.name, x: mark.from, xref: "x", y: 1, yref: "paper", yanchor: "bottom", showarrow: false,
    xanchor: mark.from > late ? "right" : "left",
    yshift: 18 + 13 * (i % 2), font: { size: 11, color: css(mark.stopped ? "--bad" : "--warn") },
  }));
  const axis = (domain) => ({
    domain, autorange: "reversed", tickvals: ticks, ticktext: ticks.map((i) => data.labels[i]), tickfont: { size: 11 },
    showgrid: false, zeroline: false, fixedrange: rows <= 32, automargin: true,
  });
  const layout = () => ({
    height, margin: { l: 40, r: 20, t: top, b: bottom }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--line"), activecolor: ink() },
    font: { color: ink(), family: "system-ui, Liberation Sans, sans-serif", size: 12 }, showlegend: true, hovermode: "closest",
    legend: { orientation: "h", font: { size: 11 }, ...(narrow
      ? { x: 0, xanchor: "left", y: -46 / inner, yanchor: "top" } : { x: 1, xanchor: "right", y: third[1], yanchor: "bottom" }) },
    xaxis: { type: "date", anchor: "y3", tickangle: 0, nticks: narrow ? 3 : 0, gridcolor: line(), range: [data.edges[0], data.edges[data.edges.length - 1]] },
    yaxis: axis(first), yaxis2: axis(second),
    yaxis3: { domain: third, rangemode: "tozero", gridcolor: line(), zeroline: false, tickformat: "~s", ticksuffix: "s", fixedrange: true, automargin: true },
    shapes: data.marks.flatMap((mark) => {
      const color = css(mark.stopped ? "--bad" : "--warn");
      const base = { xref: "x", yref: "paper", y0: 0, y1: 1 };
      return [{ ...base, type: "line", x0: mark.from, x1: mark.from, line: { color, width: 1.5, dash: mark.stopped ? "solid" : "dot" } },
        ...(mark.stopped ? [{ ...base, type: "rect", x0: mark.from, x1: mark.until, fillcolor: color, opacity: 0.13, line: { width: 0 } }] : [])];
    }),
    annotations: [
      heading(narrow ? "Lateness a step" : "Lateness: own work above the median of its equals, a step" +
        (data.folded ? " (of folded rows: the latest rank)" : ""), first),
      heading("Step time", second), heading("Step time of the job", third), ...named()],
  });
  const traces = () => [
    heat(grids.late, data.lateRange, "y", center(first), scales().late),
    heat(grids.step, data.stepRange, "y2", center(second), scales().step),
    { type: "scatter", mode: "lines", x: middles, y: data.typical, name: "typical rank", yaxis: "y3", line: { color: css("--calm"), width: 2 }, hovertemplate: "%{y:.3f} s" },
    { type: "scatter", mode: "lines", x: middles, y: data.longest, name: "longest step", yaxis: "y3", line: { color: css("--late"), width: 1.3, dash: "dot" }, hovertemplate: "%{y:.3f} s" },
  ];
  const settings = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

  const readout = document.getElementById("readout");
  const idle = readout.textContent;
  const time = (ms) => new Date(ms).toISOString().slice(11, 19);
  const tell = (event) => {
    const point = event.points[0];
    if (point.data.type !== "heatmap") { return; }
    const [row, column] = point.pointIndex || point.pointNumber;
    const late = grids.late[row][column];
    readout.textContent = data.labels[row] + " · " + time(data.edges[column]) + " to " + time(data.edges[column + 1]) +
      (data.reached[column] >= 0 ? " · up to step " + data.reached[column] : "") + " · step " + duration(grids.step[row][column]) +
      " · own work " + duration(grids.own[row][column]) + " · waiting " + duration(grids.waiting[row][column]) +
      " · " + (late !== null && late < 0 ? "ahead by " + duration(-late) : "late by " + duration(late));
  };

  window.Plotly.newPlot(plot, traces(), layout(), settings).then(() => {
    plot.on("plotly_hover", tell);
    plot.on("plotly_unhover", () => { readout.textContent = idle; });
    dark.addEventListener("change", () => window.Plotly.react(plot, traces(), layout(), settings));
    // What was really drawn, for whoever looks at the page with a program.
    plot.dataset.rows = plot.calcdata[0][0].z.length;
    plot.dataset.columns = plot.calcdata[0][0].z[0].length;
    done();
  });
})();
