/* Draws the curves of the page with uPlot, and on a watched run keeps them and the figures up to date.
   Reads the JSON in #data: {charts: [...], runs: [{label, place, axes, curves, validation, broken, lines}], live: null | {generation, offset}}.
   Colours come from the page's CSS variables, so light and dark are decided in one place. */
(function () {
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const several = data.runs.length > 1;
let axis = document.querySelector("[data-axis][aria-pressed=true]").dataset.axis, drawn = [];

const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = place => css("--c" + place % 6);
const scaled = (v, base, units) => { let i = 0; while (Math.abs(v) >= base * 0.9995 && i < units.length - 1) { v /= base; i++; } return [v, units[i]]; };
const trim = (v, digits) => Number(v.toPrecision(digits)).toString();
const FORMATS = {
  count: v => { const [n, u] = scaled(v, 1000, ["", "k", "M", "G", "T"]); return trim(n, 4) + u; },
  bytes: v => { const [n, u] = scaled(v, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]); return trim(n, 4) + " " + u; },
  share: v => trim(v * 100, 4) + "%",
  duration: v => v < 1 ? trim(v * 1000, 4) + " ms" : v < 120 ? trim(v, 4) + " s" : v < 7200 ? trim(v / 60, 4) + " min" : trim(v / 3600, 4) + " h",
  plain: v => v !== 0 && Math.abs(v) < 1e-3 ? v.toExponential(2) : trim(v, 5),
};
const AXES = { step: ["update", FORMATS.count], tokens: ["tokens", FORMATS.count], elapsed_s: ["training time", FORMATS.duration] };
const ticks = form => (u, splits) => splits.map(form);
const BINARY = Array.from({ length: 50 }, (_, i) => 2 ** i);

const WHOLE = Array.from({ length: 16 }, (_, i) => [1, 2, 5].map(n => n * 10 ** i)).flat();

/* The mean of the neighbours on both sides, fewer near the ends: unlike a running average it does not lag behind a falling loss.
   Neighbours are updates that have a number: a Trainer logs the loss of every fifth. */
function smooth(ys) {
  const places = ys.flatMap((y, i) => y === null ? [] : [i]), most = Math.max(1, Math.round(places.length / 50)), smoothed = Array(ys.length).fill(null);
  places.forEach((place, i) => {
    const half = Math.min(most, i, places.length - 1 - i), near = places.slice(i - half, i + half + 1);
    smoothed[place] = near.reduce((sum, j) => sum + ys[j], 0) / near.length;
  });
  return smoothed;
}

/* What one chart shows: curves with their own x values, and horizontal lines. */
function content(chart) {
  const curves = [], lines = [], marks = [];
  for (const run of data.runs) {
    const curve = run.curves[chart.name], xs = run.axes[axis], c = colour(run.place), label = several ? run.label + " " : "";
    if (!curve || xs.some(x => x === null)) continue;
    if (curve.low && !several) curves.push({ xs, ys: curve.low, quiet: true, stroke: c + "55", width: 1 }, { xs, ys: curve.high, quiet: true, stroke: c + "55", width: 1, fill: c + "22" });
    if (chart.smooth) {
      if (!several && !curve.low) curves.push({ xs, ys: curve.mean, label: label + chart.short, stroke: c + "66", width: 1 });
      curves.push({ xs, ys: smooth(curve.mean), label: label + "smoothed", kind: "smoothed", stroke: c, width: 2 });
    } else curves.push({ xs, ys: curve.mean, label: label + chart.short, stroke: c, width: 1.6, low: curve.low, high: curve.high });
    const v = run.validation;
    if (chart.validation && v.valid_loss.length) curves.push({ xs: v[axis], ys: v.valid_loss, label: label + "validation", kind: "validation", stroke: several ? c : colour(1), width: several ? 1 : 1.6, points: true, dash: several ? [2, 3] : null });
    for (const line of run.lines[chart.name] || []) add(lines, { ...line, kind: line.label, label: label + line.label, colour: several ? c : css("--muted") });
    if (chart.name === "loss" && run.broken) marks.push({ at: run.broken[axis], label: label + "not a number from update " + run.broken.step.toLocaleString("en") });
  }
  return { curves, lines, marks };
}

/* Runs of one plan have the same predictions: one line for all of them, in no run's colour. */
function add(lines, line) {
  const same = lines.find(other => other.kind === line.kind && other.value === line.value);
  if (same) Object.assign(same, { label: line.kind, colour: css("--muted") }); else lines.push(line);
}

function table(curves) {
  if (!curves.length) return [[]];
  return uPlot.join(curves.map(c => [c.xs, c.ys]));
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid; else high = mid; }
  return xs.length && Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
}

/* The numbers at one point of the axis. A validation holds until the next one, and says of when it is; a point that stands for several updates says between what; a run that has ended says nothing. */
function tooltip(state) {
  let box = null;
  return { hooks: {
    init: u => { box = document.createElement("div"); box.className = "tip"; box.hidden = true; u.over.appendChild(box); u.over.addEventListener("mouseleave", () => { box.hidden = true; }); },
    setCursor: u => {
      const { left, top } = u.cursor;
      if (left === undefined || left < 0 || !state.content.curves.length) { box.hidden = true; return; }
      const x = u.posToVal(left, "x"), [name, form] = AXES[axis];
      const named = state.content.curves.filter(c => !c.quiet && c.xs.length);
      if (!named.length) { box.hidden = true; return; }
      const at = named.map(c => c.xs[nearest(c.xs, x)]).reduce((a, b) => Math.abs(b - x) < Math.abs(a - x) ? b : a);
      box.replaceChildren();
      const head = document.createElement("b"); head.textContent = name + " " + form(at); box.appendChild(head);
      for (const c of named) {
        const i = c.points ? c.xs.findLastIndex(own => own <= at) : at > c.xs[c.xs.length - 1] ? -1 : nearest(c.xs, at), y = c.ys[i];
        if (y === null || y === undefined) continue;
        const among = c.low && c.low[i] < c.high[i] ? ` (mean of ${state.form(c.low[i])} to ${state.form(c.high[i])})` : "";
        const row = document.createElement("div"), dot = document.createElement("i"), when = c.points && c.xs[i] < at ? ", " + name + " " + form(c.xs[i]) : "";
        dot.style.background = c.stroke; row.append(dot, c.label + " " + state.form(y) + when + among); box.appendChild(row);
      }
      box.hidden = false;
      const right = left > u.over.clientWidth / 2;
      box.style.left = right ? "auto" : left + 14 + "px"; box.style.right = right ? u.over.clientWidth - left + 14 + "px" : "auto"; box.style.top = Math.max(0, Math.min(top, u.over.clientHeight - box.offsetHeight)) + "px";
    },
  } };
}

function drawLines(u, state) {
  const { ctx, bbox } = u, ratio = devicePixelRatio || 1, used = [];
  ctx.save(); ctx.font = 11 * ratio + "px system-ui, sans-serif"; ctx.textAlign = "right"; ctx.textBaseline = "alphabetic";
  for (const line of state.content.lines) {
    const y = u.valToPos(line.value, "y", true);
    if (y < bbox.top || y > bbox.top + bbox.height) continue;
    ctx.strokeStyle = ctx.fillStyle = line.colour; ctx.lineWidth = 1.2 * ratio; ctx.setLineDash([5 * ratio, 4 * ratio]);
    ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    const above = y - 4 * ratio, told = " " + state.form(line.value), text = ctx.measureText(line.label + told).width < bbox.width ? line.label + told : line.kind + told;
    if (!used.some(other => Math.abs(other - above) < 13 * ratio)) { ctx.fillText(text, bbox.left + bbox.width - 2 * ratio, above); used.push(above); }
  }
  state.content.marks.forEach((mark, i) => drawMark(u, mark, i));
  ctx.restore();
}

/* From here on there is nothing to draw, and that is the news. */
function drawMark(u, mark, place) {
  if (mark.at === null) return;
  const { ctx, bbox } = u, ratio = devicePixelRatio || 1, right = bbox.left + bbox.width, x = Math.min(right, Math.max(bbox.left, u.valToPos(mark.at, "x", true)));
  ctx.fillStyle = css("--accent") + "1c"; ctx.fillRect(x, bbox.top, right - x, bbox.height);
  ctx.strokeStyle = ctx.fillStyle = css("--accent"); ctx.lineWidth = 1.5 * ratio; ctx.setLineDash([]);
  ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  const fits = right - x > ctx.measureText(mark.label).width + 12 * ratio;
  ctx.textAlign = fits ? "left" : "right";
  ctx.fillText(mark.label, x + (fits ? 6 : -6) * ratio, bbox.top + (14 + 14 * place) * ratio);
}

/* Room for every curve and line. Charts that count from nothing begin at zero. */
function range(state) {
  return (u, low, high) => {
    const known = state.content.lines.map(l => l.value).concat(low === null ? [] : [low, high]);
    if (!known.length) return [0, 1];
    let min = state.chart.from_zero ? 0 : Math.min(...known), max = Math.max(...known);
    const room = (max - min || Math.abs(max) || 1) * 0.07;
    return [state.chart.from_zero ? 0 : min - room, max + room];
  };
}

function options(state, width) {
  const ink = css("--muted"), grid = { stroke: css("--line"), width: 1 }, font = "11px system-ui, sans-serif";
  const look = { stroke: ink, grid, ticks: { show: false }, font };
  return {
    width, height: state.chart.first ? 270 : 200, legend: { show: false }, cursor: { sync: { key: "redline" }, points: { show: false }, y: false },
    padding: [8, 10, 0, 0],
    scales: { x: { time: false }, y: { range: range(state) } },
    axes: [{ ...look, values: ticks(AXES[axis][1]), size: 28, space: 70, ...(axis === "elapsed_s" ? {} : { incrs: WHOLE }) }, { ...look, values: ticks(state.form), size: 62, space: 34, ...(state.chart.format === "bytes" ? { incrs: BINARY } : {}) }],
    series: [{}, ...state.content.curves.map(c => ({ stroke: c.stroke, width: c.width, fill: undefined, dash: c.dash || undefined, spanGaps: true, points: { show: Boolean(c.points) || c.xs.length === 1, size: 5, fill: c.stroke } }))],
    bands: state.content.curves.flatMap((c, i) => c.fill ? [{ series: [i + 1, i], fill: c.fill }] : []),
    hooks: { draw: [u => drawLines(u, state)] }, plugins: [tooltip(state)],
  };
}

function keyOf(state) {
  const key = document.createElement("span"); key.className = "inkey";
  const put = (text, colour, style) => { const item = document.createElement("span"), i = document.createElement("i"); i.style.borderColor = colour; i.style.borderTopStyle = style; item.append(i, text); key.appendChild(item); };
  if (!several) for (const c of state.content.curves.filter(c => c.label)) put(c.label, c.stroke, "solid");
  else {
    for (const kind of new Set(state.content.curves.filter(c => c.kind).map(c => c.kind))) put(kind, css("--muted"), kind === "validation" ? "dotted" : "solid");
    for (const line of state.content.lines) put(line.label + " " + state.form(line.value), line.colour, "dashed");
  }
  return key;
}

/* The figure without its plot: widths are known only when all figures stand in the page. */
function frame(chart, into) {
  const state = { chart, form: FORMATS[chart.format], content: content(chart) };
  if (!state.content.curves.length) return [];
  const figure = document.createElement("figure"), caption = document.createElement("figcaption"), unit = document.createElement("span"), plot = document.createElement("div");
  figure.className = "chart" + (chart.first ? " wide" : ""); figure.dataset.chart = chart.name; figure.title = chart.meaning;
  unit.className = "unit"; unit.textContent = chart.unit; caption.append(chart.title, unit);
  if (several || state.content.curves.filter(c => c.label).length > 1) caption.append(keyOf(state));
  figure.append(caption, plot); into.appendChild(figure);
  return [{ state, plot }];
}

function drawAll() {
  for (const d of drawn) d.plotted.destroy();
  const [first, main, more] = ["charts-first", "charts", "charts-more"].map(id => document.getElementById(id)), open = document.getElementById("more").open;
  for (const place of [first, main, more]) place.replaceChildren();
  const framed = data.charts.flatMap(chart => chart.main ? frame(chart, chart.first ? first : main) : open ? frame(chart, more) : []);
  drawn = framed.map(({ state, plot }) => ({ state, plot, plotted: new uPlot(options(state, Math.max(200, plot.clientWidth)), table(state.content.curves), plot) }));
  const keys = document.getElementById("keys");
  keys.replaceChildren();
  if (several) for (const run of data.runs) { const item = document.createElement("span"), dot = document.createElement("i"); dot.className = "dot c" + run.place % 6; item.append(dot, run.label); keys.appendChild(item); }
  for (const part of document.querySelectorAll(".curves")) part.hidden = !data.live && !data.runs.some(run => run.axes.step.length);
}

let width = 0, pending = 0;
new ResizeObserver(() => {
  const now = document.getElementById("charts").clientWidth;
  if (now === width) return;
  width = now; cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => { for (const d of drawn) d.plotted.setSize({ width: Math.max(200, d.plot.clientWidth), height: d.plotted.height }); });
}).observe(document.getElementById("charts"));
for (const button of document.querySelectorAll("[data-axis]")) button.addEventListener("click", () => {
  axis = button.dataset.axis;
  for (const other of document.querySelectorAll("[data-axis]")) other.setAttribute("aria-pressed", String(other === button));
  drawAll();
});
document.getElementById("more").addEventListener("toggle", drawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
if (data.live) watch(data.live);

/* Asks for what is new once a second; the server answers with points and with the figures as they now stand. */
async function watch(at) {
  const pulse = document.getElementById("pulse");
  for (;;) {
    let pause = 1000;
    try {
      const answer = await fetch("/lines?generation=" + at.generation + "&offset=" + at.offset, { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const news = await answer.json();
      if (news.afresh || news.offset !== at.offset) take(news.points, news.afresh);
      at = { generation: news.generation, offset: news.offset };
      for (const [id, html] of Object.entries(news.parts)) document.getElementById(id).innerHTML = html;
      pulse.textContent = news.state;
      if (news.over) pause = 10000;
    } catch (error) { pulse.textContent = "no answer from redline watch"; pause = 3000; }
    await new Promise(done => setTimeout(done, pause));
  }
}

function take(points, afresh) {
  const run = data.runs[0], broke = Boolean(points.broken) !== Boolean(run.broken);
  run.broken = points.broken;
  if (afresh || !run.axes.step.length) { run.axes = points.axes; run.curves = points.curves; run.validation = points.validation; drawAll(); return; }
  const before = run.axes.step.length, added = points.axes.step.length;
  for (const name of Object.keys(run.axes)) run.axes[name].push(...points.axes[name]);
  for (const name of new Set([...Object.keys(run.curves), ...Object.keys(points.curves)])) {
    const curve = run.curves[name] = run.curves[name] || { mean: Array(before).fill(null) }, more = points.curves[name];
    const mean = more ? more.mean : Array(added).fill(null);
    curve.mean.push(...mean);
    if (curve.low) { curve.low.push(...mean); curve.high.push(...mean); }
  }
  for (const name of Object.keys(run.validation)) run.validation[name].push(...points.validation[name]);
  const shown = new Set(drawn.map(d => d.state.chart.name));
  if (broke || data.charts.some(c => c.main && !shown.has(c.name) && content(c).curves.length) || drawn.some(d => content(d.state.chart).curves.length !== d.state.content.curves.length)) { drawAll(); return; }
  for (const d of drawn) { d.state.content = content(d.state.chart); d.plotted.setData(table(d.state.content.curves)); }
}
})();
