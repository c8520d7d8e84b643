// Legend, zoom, pan and hover.

/** Whether the picture is a part of a page, which the wheel moves. */
const within = canvas.parentElement.classList.contains("within");
let queued = false;
function redraw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; frame(); });
}

// ---- legend and tools ------------------------------------------------------------------------

function swatch(style) {
  const c = document.createElement("canvas");
  c.width = c.height = 14;
  const t = c.getContext("2d");
  const fill = (s, y, tall) => { t.fillStyle = inkOf(s, 0).fill; t.fillRect(0, y, 14, tall); };
  if (style === OVERLAP) { fill(FORWARD, 0, 7); fill(WHOLE_BACKWARD, 7, 7); } else fill(style, 0, 14);
  return c;
}

function entry(parent, name, ...canvases) {
  const span = document.createElement("span");
  span.append(...canvases, name);
  parent.append(span);
}

function colored(ground) {
  const box = document.createElement("i");
  box.style.background = ground;
  return box;
}

function legend() {
  const parent = document.getElementById("legend");
  const used = new Set();
  for (const run of page.runs) for (const rank of run.ranks) for (const rows of rank.rows)
    for (const row of rows) row.style.forEach(s => used.add(s));
  page.styles.forEach((style, i) => { if (used.has(i)) entry(parent, style.name, swatch(i)); });
  entry(parent, "idle", colored("var(--idle)"));
  const shades = [...new Set(page.runs.flatMap(run => run.shades))].sort((a, b) => a - b);
  if (shades.length > 1) entry(parent, "a rank's stages, first to last", ...shades.map(s => colored(inkOf(FORWARD, s).plain)));
  if (hasMemory) entry(parent, "memory", colored("color-mix(in srgb, var(--fore) 22%, var(--back))"));
}

function check(name, key) {
  const labelled = document.createElement("label"), input = document.createElement("input");
  input.type = "checkbox";
  input.checked = view[key];
  input.addEventListener("change", () => { view[key] = input.checked; redraw(); });
  labelled.append(input, name);
  document.getElementById("tools").append(labelled);
}

function tools() {
  const parent = document.getElementById("tools");
  if (hasCommunication) check("communication", "communication");
  if (hasMemory) check("memory", "memory");
  if (page.runs.length > 1) check("equal ranks together", "paired");
  for (const [text, factor, title] of [["−", 1 / 1.25, "lower lanes"], ["+", 1.25, "higher lanes"]]) {
    const button = document.createElement("button");
    button.textContent = text;
    button.title = title;
    button.addEventListener("click", () => { view.zoom = Math.min(6, Math.max(0.4, view.zoom * factor)); redraw(); });
    parent.append(button);
  }
  const all = document.createElement("button");
  all.textContent = "all";
  all.title = "see everything (also double click, or 0)";
  all.addEventListener("click", fit);
  const help = document.createElement("small");
  help.textContent = `${within ? "ctrl + wheel" : "wheel"}: zoom · drag or shift + wheel: move · hover: times`;
  parent.append(all, help);
}

// ---- zoom and pan ----------------------------------------------------------------------------

/** Whether all is in sight, as at first; it stays so where a window changes its size. */
let fitted = true;

function fit() {
  fitted = true;
  layout();
  view.start = 0;
  view.zoom = 1;
  view.top = 0;
  view.scale = page.length / plotWidth();
  redraw();
}

/** Keeps some of the run in sight. */
function limit() {
  fitted = false;
  const seen = plotWidth() * view.scale;
  view.start = Math.max(-0.1 * seen, Math.min(view.start, page.length - 0.9 * seen + 0.8 * Math.min(seen, page.length)));
}

function zoomAt(pixel, factor) {
  const time = view.start + (pixel - left) * view.scale;
  const most = 1.2 * page.length / plotWidth();
  view.scale = Math.max(0.02, Math.min(most, view.scale * factor));
  view.start = time - (pixel - left) * view.scale;
  limit();
  redraw();
}

canvas.addEventListener("wheel", e => {
  if (within && !e.ctrlKey && !e.shiftKey) return;
  e.preventDefault();
  const pixels = e.deltaMode === 1 ? 16 : 1;
  if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
    view.start += (e.deltaX || e.deltaY) * pixels * view.scale;
    limit();
    redraw();
  } else {
    zoomAt(e.offsetX / grown, Math.exp(e.deltaY * pixels * 0.0015));
  }
}, { passive: false });

let pulled = null;
canvas.addEventListener("pointerdown", e => {
  pulled = { x: e.clientX, y: e.clientY, start: view.start, top: view.top };
  canvas.setPointerCapture(e.pointerId);
  canvas.classList.add("pulled");
});
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => {
  pulled = null;
  canvas.classList.remove("pulled");
});
canvas.addEventListener("pointermove", e => {
  if (pulled) {
    view.start = pulled.start - (e.clientX - pulled.x) / grown * view.scale;
    view.top = pulled.top - (e.clientY - pulled.y) / grown;
    limit();
    redraw();
  }
  hover(pulled ? null : find(e.offsetX / grown, e.offsetY / grown), e.offsetX, e.offsetY);
});
canvas.addEventListener("pointerleave", () => hover(null));
canvas.addEventListener("dblclick", fit);
canvas.addEventListener("keydown", e => {
  const step = 0.15 * plotWidth() * view.scale;
  const moves = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -40], ArrowDown: [0, 40] };
  if (moves[e.key]) {
    view.start += moves[e.key][0];
    view.top += moves[e.key][1];
    limit();
    redraw();
  } else if (e.key === "+" || e.key === "=") zoomAt(left + plotWidth() / 2, 1 / 1.4);
  else if (e.key === "-") zoomAt(left + plotWidth() / 2, 1.4);
  else if (e.key === "0") fit();
  else return;
  e.preventDefault();
});
window.addEventListener("resize", () => { if (fitted) fit(); else redraw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); redraw(); });

// ---- hover -----------------------------------------------------------------------------------

/** The span under a point, or null. */
function find(px, py) {
  const h = heights();
  if (py < AXIS || px < left || px > left + plotWidth()) return null;
  const index = Math.floor((py - AXIS + view.top) / h.unit);
  const lane = lanes()[index];
  if (!lane) return null;
  const y = py - (AXIS + index * h.unit - view.top + h.gap / 2);
  const below = h.compute + h.communication, kind = y < h.compute ? 0 : y < below ? 1 : 2;
  const rows = lane.rank.rows[kind] || [];
  const [offset, tall] = [[0, h.compute], [h.compute + 1, h.communication - 2], [below + 1, h.copies - 2]][kind];
  if (y < offset || y >= offset + tall || !rows.length) return null;
  const r = Math.floor((y - offset) / (tall / rows.length));
  const row = rows[r], slack = 2 * view.scale, time = view.start + (px - left) * view.scale;
  let best = -1;
  // What takes no time is hit within two pixels; otherwise the span that holds the time.
  for (let i = firstAfter(row, time - slack); i < row.n && row.start[i] <= time + slack; i++) {
    const inside = row.start[i] <= time && time < row.end[i];
    if (inside || best < 0) best = i;
    if (inside) break;
  }
  if (best < 0) return null;
  return { lane, row, i: best, batch: row.batch[best] };
}

function describe({ lane, row, i }) {
  const style = row.style[i], stage = row.stage[i], batch = row.batch[i];
  let name = page.styles[style].name;
  if (style < STEP) name = `${stage}${name}${batch}`;
  if (style === OVERLAP) {
    const back = lane.rank.pairs[row.pair[i]];
    name = `${stage}F${batch} & ${back[0]}BW${back[1]}`;
  }
  const of = (stage >= 0 ? ` · stage ${stage}` : "") + (batch >= 0 ? ` · micro-batch ${batch}` : "");
  return [name, `${page.styles[style].about}${of}`, label(lane),
          `from ${exactText(row.start[i])} to ${exactText(row.end[i])}`,
          `takes ${exactText(row.end[i] - row.start[i])}`];
}

const tip = document.getElementById("tip");
function hover(found, px, py) {
  const same = found && hovered ? found.row === hovered.row && found.i === hovered.i : found === hovered;
  hovered = found;
  tip.hidden = !found;
  if (found) {
    const [name, ...lines] = describe(found);
    const bold = document.createElement("b");
    bold.textContent = name;
    tip.replaceChildren(bold, "\n" + lines.join("\n"));
    tip.style.left = Math.min(px + 14, canvas.clientWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = (py + tip.offsetHeight + 24 < canvas.clientHeight ? py + 16 : py - tip.offsetHeight - 10) + "px";
  }
  if (!same) redraw();
}

readColors();
legend();
tools();
fit();
