"use strict";
// Draws the curves of a page: one cursor and one zoom for all. Reads the JSON of the page only.
(() => {
  const holder = document.getElementById("curves-data");
  if (!holder) return;
  const data = JSON.parse(holder.textContent);
  const NS = "http://www.w3.org/2000/svg";
  const COLOURS = 6;
  const AXIS_LABEL = { step: "updates", tokens: "tokens", samples: "samples", time: "time at work" };
  const state = { axis: data.axes[0], zoom: null, cursor: null };
  const charts = data.charts.map((chart) => ({ chart, log: chart.log && positive(chart) }));

  function positive(chart) {
    return chart.series.every((s) => (s.lo || s.y).every((v) => v === null || v > 0));
  }
  function element(name, attributes, parent) {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (parent) parent.appendChild(made);
    return made;
  }
  function html(name, className, parent, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  }
  function colour(series, chart) {
    const index = data.runs.length > 1 ? series.run : chart.series.indexOf(series);
    return `var(--c${index % COLOURS})`;
  }

  // -- numbers as people read them
  function bytes(value, digits) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (Math.abs(value) >= 1024 && unit < 4) { value /= 1024; unit++; }
    return `${trim(value.toPrecision(digits || 3))} ${units[unit]}`;
  }
  function trim(text) {
    return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
  }
  function number(value, chart) {
    if (value === null || value === undefined) return "–";
    if (chart && chart.id === "memory") return bytes(value);
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e12) return value.toExponential(2);
    if (size >= 1e9) return trim((value / 1e9).toPrecision(4)) + " G";
    if (size >= 1e7) return trim((value / 1e6).toPrecision(4)) + " M";
    if (size >= 1e4) return Math.round(value).toLocaleString("en");
    if (size < 1e-3) return value.toExponential(2);
    return trim(value.toPrecision(4));
  }
  function clock(seconds) {
    const s = Math.round(seconds), h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60);
    const two = (n) => String(n).padStart(2, "0");
    return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
  }
  function position(value, axis) {
    return axis === "time" ? clock(value) : number(value);
  }
  function ticked(values, chart) {
    // As many digits as tell neighbours apart.
    for (let digits = 3; digits < 8; digits++) {
      const texts = values.map((v) => tick(v, chart, digits));
      if (new Set(texts).size === texts.length) return texts;
    }
    return values.map((v) => tick(v, chart, 8));
  }
  function tick(value, chart, digits) {
    const size = Math.abs(value), precise = digits || 4;
    if (chart.id === "memory") return bytes(value, precise);
    if (size >= 1e9) return trim((value / 1e9).toPrecision(precise)) + "G";
    if (size >= 1e6) return trim((value / 1e6).toPrecision(precise)) + "M";
    if (size >= 1e4) return trim((value / 1e3).toPrecision(precise)) + "k";
    if (size && size < 1e-3) return value.toExponential(Number.isInteger(Math.log10(size)) ? 0 : 1);
    return trim(value.toPrecision(Math.max(precise, 4)));
  }

  // -- scales
  function extent() {
    let low = Infinity, high = -Infinity;
    for (const grid of data.grids) for (const x of grid[state.axis] || []) {
      if (x === null) continue;
      if (x < low) low = x;
      if (x > high) high = x;
    }
    if (!(high > low)) { low = Math.min(low, 0) || 0; high = low + 1; }
    return [low, high];
  }
  function domain() { return state.zoom || extent(); }
  function steps(low, high, count) {
    const rough = (high - low) / count, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((f) => f >= rough) || power * 10;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }
  function timeSteps(low, high, count) {
    const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
    const step = nice.find((f) => f >= (high - low) / count) || 86400 * Math.ceil((high - low) / count / 86400);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
    return found;
  }
  function logSteps(low, high) {
    const found = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const factors = to - from > 3 ? [1] : [1, 2, 5];
    for (let e = from; e <= to; e++) for (const f of factors) {
      const v = f * Math.pow(10, e);
      if (v >= low * 0.999 && v <= high * 1.001) found.push(v);
    }
    return found.length >= 3 ? found : steps(low, high, 6);
  }
  function smoothed(values) {
    const half = Math.max(2, Math.round(values.length / 60));
    let sum = 0, n = 0, head = 0, tail = 0;
    return values.map((value, i) => {
      while (head < values.length && head <= i + half) { if (values[head] !== null) { sum += values[head]; n++; } head++; }
      while (tail < i - half) { if (values[tail] !== null) { sum -= values[tail]; n--; } tail++; }
      return n && value !== null ? sum / n : null;
    });
  }

  // -- one chart
  function build(entry, parent) {
    const { chart } = entry;
    entry.figure = html("figure", "chart" + (chart.wide ? " wide" : ""), parent);
    entry.figure.id = `chart-${chart.id}`;
    const caption = html("figcaption", "", entry.figure);
    html("b", "", caption, chart.title);
    if (chart.unit) html("span", "unit", caption, chart.unit);
    if (chart.log && positive(chart)) {
      const button = html("button", "scale", caption, "log");
      button.type = "button";
      const show = () => { button.textContent = entry.log ? "log" : "linear"; button.title = entry.log ? "logarithmic; change to linear" : "linear; change to logarithmic"; };
      button.addEventListener("click", () => { entry.log = !entry.log; show(); draw(entry); });
      show();
    }
    const legend = html("span", "legend", caption);
    entry.values = chart.series.map((series) => {
      const item = html("span", "", legend);
      html("i", "", item).style.background = colour(series, chart);
      item.appendChild(document.createTextNode(chart.series.length > 1 || data.runs.length > 1 ? series.label + " " : ""));
      return html("b", "", item);
    });
    for (const series of chart.series) {
      if (series.smooth && series.y.length > 120) series.mean = smoothed(series.y);
    }
    entry.svg = element("svg", { role: "img", "aria-label": `${chart.title} over ${AXIS_LABEL[state.axis]}` }, entry.figure);
    listen(entry);
  }
  function visible(series, x0, x1) {
    const xs = data.grids[series.grid][state.axis] || [];
    const inside = [];
    for (let i = 0; i < xs.length; i++) if (xs[i] !== null && xs[i] >= x0 && xs[i] <= x1) inside.push(i);
    return inside;
  }
  function draw(entry) {
    const { chart, svg } = entry;
    const width = Math.max(200, svg.parentNode.clientWidth - 28 + (window.innerWidth <= 720 ? 8 : 0));
    const height = chart.wide ? (width < 480 ? 240 : 300) : 190;
    const [x0, x1] = domain();
    let low = Infinity, high = -Infinity;
    for (const series of chart.series) for (const i of visible(series, x0, x1)) {
      const a = series.lo ? series.lo[i] : series.y[i], b = series.hi ? series.hi[i] : series.y[i];
      if (a !== null && a < low) low = a;
      if (b !== null && b > high) high = b;
    }
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    if (low > high) { low = 0; high = 1; }
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= entry.log ? low * 0.1 : pad; high += pad; }
    const log = entry.log && low > 0;
    if (!log) {
      const pad = (high - low) * 0.06;
      const least = chart.series.some((s) => s.y.some((v) => v !== null && v < 0));
      low = !least && low - pad < (high - low) * 0.25 ? Math.min(0, low) : low - pad;
      high += pad;
    } else { low *= 0.97; high *= 1.03; }
    const ticks = log ? logSteps(low, high) : steps(low, high, height > 200 ? 5 : 4);
    const texts = ticked(ticks, chart);
    const longest = Math.max(...texts.map((text) => text.length), 2);
    const box = { left: 12 + longest * 6.4, right: width - 8, top: 14, bottom: height - 22 };
    const f = log ? Math.log : (v) => v;
    const X = (x) => box.left + ((x - x0) / (x1 - x0)) * (box.right - box.left);
    const Y = (y) => box.bottom - ((f(y) - f(low)) / (f(high) - f(low))) * (box.bottom - box.top);
    Object.assign(entry, { X, Y, box, width, height });
    ticks.forEach((t, i) => {
      element("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(t), y2: Y(t) }, svg);
      element("text", { x: box.left - 6, y: Y(t) + 3.5, "text-anchor": "end" }, svg).textContent = texts[i];
    });
    const count = Math.max(3, Math.floor((box.right - box.left) / 80));
    const places = state.axis === "time" ? timeSteps(x0, x1, count) : steps(x0, x1, count).filter((t) => x1 - x0 < 2 || Number.isInteger(t));
    for (const t of places) {
      const text = state.axis === "time" ? clock(t) : tick(t, {});
      const at = X(t), anchor = at > box.right - 16 ? "end" : at < box.left + 10 ? "start" : "middle";
      element("text", { x: at, y: height - 6, "text-anchor": anchor }, svg).textContent = text;
    }
    element("line", { class: "frame", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
    marks(entry, x0, x1);
    for (const series of chart.series) curve(entry, series, x0, x1);
    entry.overlay = element("g", {}, svg);
    point(entry);
  }
  function marks(entry, x0, x1) {
    for (const run of data.runs) for (const mark of run.marks) {
      const x = mark[state.axis];
      if (x === undefined || x === null || x < x0 || x > x1) continue;
      const at = entry.X(x), kind = mark.level || "";
      element("line", { class: `mark ${kind}`, x1: at, x2: at, y1: entry.box.top - 4, y2: entry.box.bottom }, entry.svg);
      const flag = element("path", { class: `flag ${kind}`, d: `M${at - 4} ${entry.box.top - 11}h8l-4 7z` }, entry.svg);
      element("title", {}, flag).textContent = mark.text;
    }
  }
  function path(xs, ys, entry, from, to) {
    let text = "", open = false;
    for (let i = from; i <= to; i++) {
      if (ys[i] === null || xs[i] === null) { open = false; continue; }
      text += `${open ? "L" : "M"}${entry.X(xs[i]).toFixed(1)} ${entry.Y(ys[i]).toFixed(1)}`;
      open = true;
    }
    return text;
  }
  function curve(entry, series, x0, x1) {
    const inside = visible(series, x0, x1);
    if (!inside.length) return;
    const xs = data.grids[series.grid][state.axis];
    const from = inside[0], to = inside[inside.length - 1], stroke = colour(series, entry.chart);
    const group = element("g", { fill: "none", stroke, "stroke-linejoin": "round", "stroke-linecap": "round" }, entry.svg);
    if (series.lo) {
      const across = [], back = [];
      for (let i = from; i <= to; i++) if (series.lo[i] !== null) {
        across.push(`${entry.X(xs[i]).toFixed(1)} ${entry.Y(series.hi[i]).toFixed(1)}`);
        back.unshift(`${entry.X(xs[i]).toFixed(1)} ${entry.Y(series.lo[i]).toFixed(1)}`);
      }
      if (across.length) element("path", { d: `M${across.join("L")}L${back.join("L")}Z`, fill: stroke, stroke: "none", opacity: 0.18 }, group);
    }
    if (series.mean && !series.lo) {
      element("path", { d: path(xs, series.y, entry, from, to), "stroke-width": 1, opacity: 0.34 }, group);
    }
    const line = element("path", { d: path(xs, series.mean || series.y, entry, from, to), "stroke-width": 1.8 }, group);
    if (data.runs.length > 1 && entry.chart.series.find((s) => s.run === series.run) !== series) line.setAttribute("stroke-dasharray", "6 4");
    if (series.dots || inside.length < 3) {
      const radius = inside.length > 60 ? 1.6 : 3;
      for (const i of inside) if (series.y[i] !== null) {
        element("circle", { cx: entry.X(xs[i]), cy: entry.Y(series.y[i]), r: radius, fill: stroke, stroke: "var(--card)", "stroke-width": 1 }, group);
      }
    }
  }

  // -- cursor and zoom, shared
  function nearest(xs, x) {
    let best = -1, distance = Infinity;
    for (let i = 0; i < xs.length; i++) {
      if (xs[i] === null) continue;
      const d = Math.abs(xs[i] - x);
      if (d < distance) { best = i; distance = d; }
    }
    return best;
  }
  function last(values) {
    for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return i;
    return -1;
  }
  function point(entry) {
    entry.overlay.replaceChildren();
    const [x0, x1] = domain();
    const at = state.cursor;
    if (at !== null && at >= x0 && at <= x1) {
      element("line", { class: "cursor", x1: entry.X(at), x2: entry.X(at), y1: entry.box.top - 4, y2: entry.box.bottom }, entry.overlay);
    }
    entry.chart.series.forEach((series, index) => {
      const xs = data.grids[series.grid][state.axis] || [];
      const i = at === null ? last(series.y) : nearest(xs, at);
      entry.values[index].textContent = i < 0 ? "–" : number(series.y[i], entry.chart);
      if (at !== null && i >= 0 && series.y[i] !== null && xs[i] >= x0 && xs[i] <= x1) {
        element("circle", { cx: entry.X(xs[i]), cy: entry.Y(series.y[i]), r: 3.2, fill: colour(series, entry.chart), stroke: "var(--card)", "stroke-width": 1.4 }, entry.overlay);
      }
    });
  }
  const readout = document.querySelector(".readout");
  const hint = readout.textContent;
  function tell() {
    readout.replaceChildren();
    if (state.cursor === null) { readout.textContent = hint; return; }
    const grid = data.grids[0], i = nearest(grid[state.axis] || [], state.cursor);
    data.axes.forEach((axis, index) => {
      if (!grid[axis] || i < 0) return;
      if (index) readout.appendChild(document.createTextNode(" · "));
      readout.appendChild(document.createTextNode(axis === "time" ? "at " : axis === "step" ? "update " : ""));
      html("b", "", readout, position(grid[axis][i], axis));
      if (axis === "tokens" || axis === "samples") readout.appendChild(document.createTextNode(` ${axis}`));
    });
    const [x0, x1] = domain();
    for (const run of data.runs) for (const mark of run.marks) {
      const x = mark[state.axis];
      if (x !== undefined && x !== null && Math.abs(x - state.cursor) < (x1 - x0) * 0.012) {
        readout.appendChild(document.createTextNode(` · ▾ ${run.label ? run.label + ": " : ""}${mark.text}`));
      }
    }
  }
  let waiting = false;
  function refresh(all) {
    refresh.all = refresh.all || all;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      const whole = refresh.all;
      refresh.all = false;
      for (const entry of charts) if (whole) draw(entry); else point(entry);
      tell();
      for (const button of document.querySelectorAll("[data-zoom='reset']")) button.disabled = state.zoom === null;
    });
  }
  function listen(entry) {
    let start = null, brush = null;
    const inside = (event) => {
      const box = entry.svg.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * entry.width;
      const share = (px - entry.box.left) / (entry.box.right - entry.box.left);
      const [x0, x1] = domain();
      return x0 + Math.min(1, Math.max(0, share)) * (x1 - x0);
    };
    entry.svg.addEventListener("pointermove", (event) => {
      state.cursor = inside(event);
      if (start !== null && event.pointerType === "mouse") {
        if (!brush) brush = element("rect", { class: "brush", y: entry.box.top, height: entry.box.bottom - entry.box.top }, entry.svg);
        const a = entry.X(Math.min(start, state.cursor)), b = entry.X(Math.max(start, state.cursor));
        brush.setAttribute("x", a);
        brush.setAttribute("width", b - a);
      }
      refresh(false);
    });
    entry.svg.addEventListener("pointerdown", (event) => {
      state.cursor = inside(event);
      if (event.pointerType === "mouse") { start = state.cursor; entry.svg.setPointerCapture(event.pointerId); }
      refresh(false);
    });
    entry.svg.addEventListener("pointerup", () => {
      if (brush) brush.remove();
      const [x0, x1] = domain();
      if (start !== null && Math.abs(state.cursor - start) > (x1 - x0) * 0.01) {
        state.zoom = [Math.min(start, state.cursor), Math.max(start, state.cursor)];
        refresh(true);
      }
      start = brush = null;
    });
    entry.svg.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse" && start === null) { state.cursor = null; refresh(false); }
    });
    entry.svg.addEventListener("dblclick", () => { state.zoom = null; refresh(true); });
  }
  function tools() {
    const bar = document.querySelector(".tools");
    const axes = html("span", "group", bar);
    const buttons = data.axes.map((axis) => {
      const button = html("button", "", axes, AXIS_LABEL[axis]);
      button.type = "button";
      button.addEventListener("click", () => { state.axis = axis; state.zoom = state.cursor = null; press(); refresh(true); });
      return button;
    });
    const press = () => buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(data.axes[i] === state.axis)));
    press();
    const zoom = html("span", "group", bar);
    const act = (text, name, action) => {
      const button = html("button", "", zoom, text);
      button.type = "button";
      button.dataset.zoom = name;
      button.addEventListener("click", () => { action(); refresh(true); });
    };
    const around = (factor) => {
      const [x0, x1] = domain(), [e0, e1] = extent();
      const middle = state.cursor === null ? (x0 + x1) / 2 : state.cursor;
      const a = Math.max(e0, middle - (middle - x0) * factor), b = Math.min(e1, middle + (x1 - middle) * factor);
      state.zoom = a <= e0 && b >= e1 ? null : [a, b];
    };
    act("zoom in", "in", () => around(0.5));
    act("zoom out", "out", () => around(2));
    act("all", "reset", () => { state.zoom = null; });
    document.querySelector("[data-zoom='reset']").disabled = true;
  }
  const parent = document.querySelector(".charts");
  if (data.axes.length) tools();
  for (const entry of charts) build(entry, parent);
  refresh(true);
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; refresh(true); } });
  window.addEventListener("beforeprint", () => { for (const entry of charts) draw(entry); });
  window.addEventListener("afterprint", () => refresh(true));
})();
