"use strict";
// Reads the data and draws one frame; page.js moves the view.

const page = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas");
const ink = canvas.getContext("2d");
const FONT = 'system-ui, "DejaVu Sans", "Segoe UI", Helvetica, sans-serif';
const FORWARD = 0, WHOLE_BACKWARD = 3, OVERLAP = 12, STEP = 5;
const AXIS = 28, NARROW = 700;

/** What is seen: time at the left edge and time per pixel (ns), and the pixels scrolled down. */
const view = { start: 0, scale: 1, top: 0, zoom: 1, communication: true, memory: true, paired: page.runs.length > 1 };
let hovered = null;
/** The page's colours of grounds, words and lines, in its light or dark mode. */
const theme = {};
function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["back", "fore", "soft", "line", "idle"]) theme[name] = style.getPropertyValue("--" + name);
}

// ---- data ------------------------------------------------------------------------------------

/** A row of spans as columns, so that a frame can search it by time. */
function columns(flat) {
  const n = flat.length / 6;
  const row = { n, start: new Float64Array(n), end: new Float64Array(n), style: new Uint8Array(n),
                stage: new Int32Array(n), batch: new Int32Array(n), pair: new Int32Array(n) };
  let at = 0;
  for (let i = 0; i < n; i++) {
    at += flat[6 * i];
    row.start[i] = at;
    row.end[i] = at + flat[6 * i + 1];
    row.style[i] = flat[6 * i + 2];
    row.stage[i] = flat[6 * i + 3];
    row.batch[i] = flat[6 * i + 4];
    row.pair[i] = flat[6 * i + 5];
  }
  return row;
}

for (const run of page.runs) {
  for (const rank of run.ranks) {
    rank.run = run;
    rank.rows = rank.rows.map(rows => rows.map(columns));
  }
}
const hasCommunication = page.runs.some(run => run.ranks.some(rank => rank.rows[1].length));
const hasCopies = page.runs.some(run => run.ranks.some(rank => rank.rows.length > 2));
const hasMemory = page.runs.some(run => run.memory > 0);

/** Ranks in the order they are drawn; where runs are paired, equal ranks stand together. */
function lanes() {
  const all = page.runs.flatMap((run, r) => run.ranks.map((rank, i) => ({ rank, r, i })));
  if (view.paired) all.sort((a, b) => a.i - b.i || a.r - b.r);
  return all;
}

/** Index of the first span of a row that ends after `time`. */
function firstAfter(row, time) {
  let low = 0, high = row.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.end[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

// ---- words -----------------------------------------------------------------------------------

/** A time on the axis, in the unit that the step between two needs. */
function timeText(ns, step) {
  const [unit, size] = step < 1e3 ? ["ns", 1] : step < 1e6 ? ["µs", 1e3] : step < 1e9 ? ["ms", 1e6] : ["s", 1e9];
  return `${Math.round(ns / size).toLocaleString("en")} ${unit}`;
}

/** A time to the nanosecond, in µs where it is long enough. */
function exactText(ns) {
  return ns < 1e3 ? ns + " ns" : (ns / 1e3).toLocaleString("en", { maximumFractionDigits: 3 }) + " µs";
}

// ---- colours ---------------------------------------------------------------------------------

const inks = new Map();

/** Fill (with texture), plain fill and text colour of a style in a shade. */
function inkOf(style, shade) {
  const key = style + "/" + shade;
  if (inks.has(key)) return inks.get(key);
  const { color, texture } = page.styles[style];
  const rgb = [1, 3, 5].map(i => parseInt(color.slice(i, i + 2), 16)).map(c => Math.round(c + 0.55 * shade * (255 - c)));
  const plain = `rgb(${rgb})`;
  const light = 0.2126 * (rgb[0] / 255) ** 2.2 + 0.7152 * (rgb[1] / 255) ** 2.2 + 0.0722 * (rgb[2] / 255) ** 2.2;
  const made = { plain, fill: texture === "solid" ? plain : pattern(plain, texture), text: light < 0.24 ? "#fff" : "#000" };
  inks.set(key, made);
  return made;
}

function pattern(color, texture) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const t = tile.getContext("2d");
  t.fillStyle = color;
  t.fillRect(0, 0, 8, 8);
  t.strokeStyle = "rgb(255 255 255 / .38)";
  t.lineWidth = 1.5;
  t.beginPath();
  if (texture === "diagonal") {
    for (const x of [-8, 0, 8]) { t.moveTo(x - 1, 9); t.lineTo(x + 9, -1); }
  } else if (texture === "horizontal") {
    for (const y of [2, 6]) { t.moveTo(0, y); t.lineTo(8, y); }
  } else {
    t.fillStyle = "rgb(0 0 0 / .3)";
    t.fillRect(1, 1, 2, 2);
    t.fillRect(5, 5, 2, 2);
  }
  t.stroke();
  return ink.createPattern(tile, "repeat");
}

/** A run's inks by style, then stage + 1; only the computes of stages are shaded. */
for (const run of page.runs) {
  run.inks = page.styles.map((_, style) =>
    [0, ...run.shades].map(shade => inkOf(style, style < STEP ? shade : 0)));
}

// ---- a frame ---------------------------------------------------------------------------------

let width = 0, height = 0, left = 0, right = 140;
/** Pixels of the page for one of the picture: all of it grows with the page's text. */
let grown = 1;

function layout() {
  grown = Math.max(1, parseFloat(getComputedStyle(document.body).fontSize) / 15);
  width = canvas.clientWidth / grown;
  height = canvas.clientHeight / grown;
  const dots = (window.devicePixelRatio || 1) * grown;
  if (canvas.width !== Math.round(width * dots) || canvas.height !== Math.round(height * dots)) {
    canvas.width = Math.round(width * dots);
    canvas.height = Math.round(height * dots);
  }
  ink.setTransform(dots, 0, 0, dots, 0, 0);
  ink.font = `12px ${FONT}`;
  const names = lanes().map(l => ink.measureText(label(l)).width);
  // A narrow window has no columns beside the lanes: the table above has their numbers.
  right = width < NARROW ? 8 : 140;
  const room = width < NARROW ? Math.max(40, ...names) : Math.max(hasMemory ? 72 : 60, ...names);
  left = Math.min(room + (width < NARROW ? 14 : 24), width / (width < NARROW ? 4 : 3));
}

function label({ rank, r }) {
  return page.runs.length > 1 ? `${"ABCDEFGH"[r]}: ${rank.name}` : rank.name;
}

const plotWidth = () => Math.max(50, width - left - right);
const x = time => left + (time - view.start) / view.scale;

/** Heights of a rank's parts; they fill the window where the ranks are few. */
function heights() {
  const room = (height - AXIS) / Math.max(1, lanes().length);
  const unit = Math.min(160, Math.max(17, room)) * view.zoom;
  const communication = hasCommunication && view.communication ? 0.24 * unit : 0;
  const copies = hasCopies && view.communication ? 0.12 * unit : 0;
  const memory = hasMemory && view.memory ? 0.24 * unit : 0;
  const gap = 0.12 * unit;
  const compute = unit - communication - copies - memory - gap;
  return { unit, communication, copies, memory, gap, compute, lanes: compute + communication + copies };
}

function frame() {
  layout();
  const h = heights();
  view.top = Math.max(0, Math.min(view.top, lanes().length * h.unit - (height - AXIS)));
  ink.clearRect(0, 0, width, height);
  const ticks = tickTimes();
  ink.fillStyle = theme.line;
  for (const t of ticks.times) ink.fillRect(Math.round(x(t)), AXIS, 1, height);
  lanes().forEach((lane, i) => {
    const top = AXIS + i * h.unit - view.top + h.gap / 2;
    if (top < height && top + h.unit > AXIS) drawLane(lane, top, h);
  });
  drawAxis(ticks);
}

function tickTimes() {
  const least = 110 * view.scale;
  let step = 10 ** Math.floor(Math.log10(least));
  for (const factor of [2, 5, 10]) if (step < least) step = 10 ** Math.floor(Math.log10(least)) * factor;
  step = Math.max(1, step);
  const times = [];
  const end = view.start + plotWidth() * view.scale;
  for (let t = Math.ceil(Math.max(0, view.start) / step) * step; t <= end; t += step) times.push(t);
  return { step, times };
}

function drawAxis({ step, times }) {
  ink.fillStyle = theme.back;
  ink.fillRect(0, 0, width, AXIS - 3);
  ink.fillStyle = theme.soft;
  ink.font = `12px ${FONT}`;
  ink.textBaseline = "middle";
  ink.textAlign = "center";
  for (const t of times) {
    const text = timeText(t, step);
    // The last one ends where the columns begin; a centred one would lie on them.
    ink.fillText(text, Math.min(x(t), left + plotWidth() - ink.measureText(text).width / 2), AXIS / 2 - 2);
  }
  ink.textAlign = "right";
  if (width >= NARROW) ink.fillText("bubble", width - right + 60, AXIS / 2 - 2);
  if (hasMemory && width >= NARROW) ink.fillText("peak", width - 10, AXIS / 2 - 2);
  ink.fillStyle = theme.line;
  ink.fillRect(0, AXIS - 4, width, 1);
}

function drawLane(lane, top, h) {
  const { rank } = lane;
  ink.save();
  ink.beginPath();
  ink.rect(left, AXIS, plotWidth(), height - AXIS);
  ink.clip();
  if (rank.own.length) {
    ink.fillStyle = theme.idle;
    ink.fillRect(x(rank.own[0]), top, (rank.own[1] - rank.own[0]) / view.scale, h.compute);
  }
  drawRows(rank, rank.rows[0], top, h.compute);
  if (h.communication) drawRows(rank, rank.rows[1], top + h.compute + 1, h.communication - 2);
  if (h.copies && rank.rows[2]) drawRows(rank, rank.rows[2], top + h.compute + h.communication + 1, h.copies - 2);
  if (h.memory) drawMemory(rank, top + h.lanes, h.memory);
  ink.restore();
  if (h.memory >= 18 && rank.memory.length && width >= NARROW) memoryAxis(rank, top + h.lanes, h.memory);
  ink.fillStyle = theme.fore;
  ink.font = `12px ${FONT}`;
  ink.textBaseline = "middle";
  ink.textAlign = "left";
  const middle = top + Math.max(h.compute / 2, 6);
  ink.fillText(label(lane), width < NARROW ? 4 : 12, middle, left - (width < NARROW ? 8 : 18));
  if (width < NARROW) return;
  ink.textAlign = "right";
  ink.fillText(rank.bubble, width - right + 60, middle);
  ink.fillText(rank.peak, width - 10, middle);
}

/** The scale of memory, left of a curve: all lanes in the same unit have the same one. */
function memoryAxis(rank, top, tall) {
  ink.fillStyle = theme.soft;
  ink.fillRect(left - 1, top + 2, 1, tall - 2);
  ink.fillRect(left - 4, top + 2, 4, 1);
  ink.fillRect(left - 4, top + tall - 1, 4, 1);
  ink.font = `9px ${FONT}`;
  ink.textBaseline = "middle";
  ink.textAlign = "right";
  ink.fillText(rank.run.most, left - 6, top + 5);
  ink.fillText("0", left - 6, top + tall - 3);
}

function drawRows(rank, rows, top, heightAll) {
  const each = heightAll / Math.max(1, rows.length);
  rows.forEach((row, r) => drawRow(rank, row, top + r * each, each));
}

/** The fill style that is set, where a row of boxes knows it. */
let painting = null;

function drawRow(rank, row, top, each) {
  const end = view.start + plotWidth() * view.scale;
  let painted = -1;
  painting = null;
  for (let i = firstAfter(row, view.start); i < row.n && row.start[i] < end; i++) {
    const from = x(row.start[i]);
    const wide = Math.max((row.end[i] - row.start[i]) / view.scale, 1);
    // Spans thinner than a pixel share it; half a pixel's step keeps what a frame paints bounded.
    if (from + wide < painted + 0.5 && wide <= 1) continue;
    painted = from + wide;
    const style = row.style[i];
    if (style === OVERLAP) {
      const back = rank.pairs[row.pair[i]];
      box(rank, FORWARD, row.stage[i], row.batch[i], from, top, wide, each / 2);
      box(rank, WHOLE_BACKWARD, back[0], back[1], from, top + each / 2, wide, each / 2);
    } else {
      box(rank, style, row.stage[i], row.batch[i], from, top, wide, each);
    }
  }
}

function box(rank, style, stage, batch, from, top, wide, tall) {
  const inks = rank.run.inks[style];
  const colors = inks[stage + 1] ?? inks[0];
  const gap = Math.min(1, 0.12 * wide);
  const fill = wide < 5 || tall < 5 ? colors.plain : colors.fill;
  // Setting a style costs more than filling a small box.
  if (fill !== painting) ink.fillStyle = painting = fill;
  ink.fillRect(from, top, wide - gap, tall - Math.min(1, 0.1 * tall));
  const same = hovered && hovered.batch >= 0 && batch === hovered.batch;
  if (same && wide >= 3) {
    ink.strokeStyle = theme.fore;
    ink.lineWidth = 1.5;
    ink.strokeRect(from + 0.75, top + 0.75, wide - gap - 1.5, tall - 2);
  }
  const most = Math.min(13, tall - 3);
  if (wide < 6 || batch < 0 || most < 8 || (style > STEP && wide < 40)) return;
  const text = wide > 8 * most && style < STEP ? `${stage}${page.styles[style].name}${batch}` : String(batch);
  const size = Math.min(most, (wide - gap - 2) / (0.62 * text.length));
  if (size < 8) return;
  ink.font = `${size}px ${FONT}`;
  ink.textAlign = "center";
  ink.textBaseline = "middle";
  const middle = from + (wide - gap) / 2;
  if (colors.fill !== colors.plain) {
    // A halo of the plain colour keeps the texture from the digits.
    ink.strokeStyle = colors.plain;
    ink.lineWidth = 3;
    ink.lineJoin = "round";
    ink.strokeText(text, middle, top + tall / 2);
  }
  ink.fillStyle = colors.text;
  ink.fillText(text, middle, top + tall / 2);
  painting = null;
}

function drawMemory(rank, top, tall) {
  const points = rank.memory, base = top + tall;
  if (!points.length) return;
  const y = bytes => base - (tall - 2) * bytes / rank.run.memory;
  const end = view.start + plotWidth() * view.scale;
  let i = 0;
  for (let low = 0, high = points.length / 2; low < high;) {
    const middle = (low + high) >> 1;
    if (points[2 * middle] < view.start) { low = middle + 1; i = middle; } else high = middle;
  }
  ink.beginPath();
  ink.moveTo(x(points[2 * i]), base);
  let level = base, column = -1;
  for (; 2 * i < points.length && points[2 * i] <= end; i++) {
    const at = x(points[2 * i]);
    // Within one pixel column the largest value is what matters.
    const next = y(points[2 * i + 1]);
    if (Math.floor(at) === column && next > level && 2 * i + 2 < points.length) continue;
    column = Math.floor(at);
    ink.lineTo(at, level);
    ink.lineTo(at, next);
    level = next;
  }
  const last = x(Math.min(end, rank.run.length));
  ink.lineTo(last, level);
  ink.lineTo(last, base);
  ink.globalAlpha = .22;
  ink.fillStyle = theme.fore;
  ink.fill();
  ink.globalAlpha = 1;
  ink.strokeStyle = theme.soft;
  ink.lineWidth = 1;
  ink.stroke();
}
