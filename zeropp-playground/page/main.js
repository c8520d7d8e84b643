// Controls to requests, answers to pictures.
const STAGES_MAX = 64;
let kinds = [], charts = [], view = null, extent = 1, trace = null;
const $ = (id) => document.getElementById(id);

function fillControls() {
  for (const key of FIELDS) $(key).value = state[key];
  showLists();
  for (const key of SWITCHES) $(key).checked = state[key];
  for (const key of ["t_f", "t_b", "t_w"]) slide(key);
  for (const box of $("others").querySelectorAll("input")) box.checked = state.others.includes(box.value);
}

// A list has a line of its own, so that it is not cut.
function showLists() {
  for (const key of [...TIMES, ...SIZES]) $(key).classList.toggle("list", state[key].includes(","));
}

// Sliders go from nothing to twice the largest of the three numbers that stood there when they were filled.
function slide(key) {
  const number = numbers(state[key]), slider = $(key + "_slide");
  slider.disabled = Array.isArray(number) || number === null;
  if (slider.disabled) return;
  const all = ["t_f", "t_b", "t_w"].flatMap((other) => numbers(state[other]) ?? 0);
  slider.max = Math.max(2 * Math.max(...all), 3);
  slider.step = slider.max / 300;
  slider.value = number;
}

// Sliders for F, B and W of each stage, made where they are looked at.
function showStages() {
  const host = $("stages");
  const n = lacking || !charts.length ? 0 : charts[0].answer.placement.length;
  $("each").hidden = !n || n > STAGES_MAX;
  if ($("each").hidden || !$("each").open) return;
  const list = (key) => { const x = numbers(state[key]); return Array.isArray(x) ? x : Array(n).fill(x); };
  if (host.childElementCount !== n) host.replaceChildren(...Array.from({ length: n }, (_, stage) => stageRow(stage)));
  for (const key of ["t_f", "t_b", "t_w"]) {
    const all = list(key), most = Math.max(1, 3 * (all.reduce((a, b) => a + b, 0) / all.length));
    host.querySelectorAll(`[data-key=${key}]`).forEach((slider, stage) => {
      if (slider === document.activeElement) return;
      slider.max = most;
      slider.step = most / 300;
      slider.value = all[stage];
    });
  }
}

function stageRow(stage) {
  const row = document.createElement("div");
  row.append(`${stage} `);
  for (const key of ["t_f", "t_b", "t_w"]) {
    const slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0 });
    slider.dataset.key = key;
    slider.setAttribute("aria-label", `${key.slice(2).toUpperCase()} of stage ${stage}`);
    slider.oninput = (e) => {
      e.stopPropagation();
      const x = numbers(state[key]), n = $("stages").childElementCount;
      const all = Array.isArray(x) && x.length === n ? x : Array(n).fill(Array.isArray(x) ? x[0] : x);
      all[stage] = +(+slider.value).toPrecision(4);
      $(key).value = all.join(",");
      slide(key);
      changed(key);
    };
    row.append(slider);
  }
  return row;
}

function readControls() {
  for (const key of FIELDS) state[key] = $(key).value;
  showLists();
  for (const key of SWITCHES) state[key] = $(key).checked;
  state.others = [...$("others").querySelectorAll("input:checked")].map((box) => box.value);
}

function say(text, bad) {
  $("message").textContent = text;
  $("message").className = bad ? "bad" : "";
}

// What was wrong with the address or a file, until something else is asked for.
let notice = "";

// Why the first chart is not what the controls ask for; nothing where it is.
let lacking = "";

function fault(problem) {
  if (!problem.field && !problem.text) throw problem;
  if (problem.field) $(problem.field).setAttribute("aria-invalid", "true");
  say(problem.text, true);
}

// Does what a button is for, with what the controls say now; tells what is wrong with them.
async function guarded(act) {
  try {
    while (soon.waiting) await soon.over;
    await act();
  } catch (problem) {
    fault(problem);
  }
}

function showControls() {
  const row = kinds.find((k) => k.name === state.kind);
  const inView = kinds.filter((k) => k === row || state.others.includes(k.name));
  $("about").textContent = row ? row.about : "";
  $("virtual").disabled = inView.every((k) => k.only);
  $("unit").disabled = !inView.some((k) => k.units);
  $("slices").disabled = !inView.some((k) => k.slices);
  $("pairs").disabled = $("slices").disabled || Number(state.slices) === 1;
  $("layers").disabled = !state.per_layer;
  for (const input of $("controls").querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
}

// The answer for a kind, whose time is kept; an error where it drew another V than is given.
function draw(kind) {
  const asked = wanted(kind), told = {};
  const answer = program.ask({ ask: "draw", wanted: asked }, told);
  if (told.ms) soon.took.set(kind, { size: sizeOf(asked), ms: told.ms });
  const row = kinds.find((k) => k.name === kind), v = answer.numbers && answer.numbers.virtual;
  if (kind !== state.kind || asked.virtual === null || answer.error || row.only) return answer;
  if (v === asked.virtual) return answer;
  const works = `use a multiple of ${row.stages}, or leave it empty`;
  return { error: refused("virtual", `${kind} cannot have it`, works).text };
}

function drawByHand() {
  const answer = program.ask({ ask: "edit", csv: editor.csv, wanted: wanted(state.kind, true) });
  faults(answer);
  return answer;
}

// All that is in view: the chosen kind or the schedule by hand, the others, the trace.
function answers() {
  const byHand = editor.on && editor.csv;
  const title = (kind) => (Number(state.slices) === 1 || sliced(kind) ? kind : `${kind}, whole samples`);
  const all = [byHand ? ["by hand", drawByHand()] : [title(state.kind), draw(state.kind)]];
  const others = state.others.filter((kind) => kind !== state.kind || editor.on);
  for (const kind of others) all.push([title(kind), draw(kind)]);
  if (trace) all.push([trace.trace + ", measured", trace]);
  return all;
}

// An error and what it is of, where it does not say so itself.
function told([title, { error }]) {
  return error.includes(title) ? error : `${title}: ${error}`;
}

function redraw(keepView) {
  const began = performance.now();
  stopWaiting();
  showControls();
  let all;
  try {
    all = answers();
  } catch (problem) {
    lacking = problem.text ?? String(problem);
    grey(true, true);
    if (!editor.on) fillCsv("");
    return fault(problem);
  }
  const [first] = all, shown = all.filter(([, answer]) => !answer.error);
  const failed = all.find(([, answer]) => answer.error);
  lacking = first[1].error ? told(first) : "";
  grey(!shown.length, false);
  if (shown.length) show(shown, keepView);
  showStages();
  say(notice, Boolean(notice));
  if (failed) fault({ field: fieldOf(failed[1].error), text: told(failed) });
  if (!editor.on) { editor.csv = ""; fillCsv(lacking ? "" : first[1].csv); }
  const ms = performance.now() - began;
  $("picture").dataset.ms = ms.toFixed(1);
  // A table of what is slow keeps away from a hand that is still typing.
  redraw.later = setTimeout(updateTable, Math.min(Math.max(120, 2 * ms), 2000));
}

// Pictures and tables that the controls do not ask for any more.
function grey(pictures, table) {
  $("charts").classList.toggle("stale", pictures);
  for (const id of ["table", "scatter"]) $(id).classList.toggle("stale", table);
}

// The table fills row by row, so that the page answers meanwhile, the slow ones beside it; a change
// begins anew.
function updateTable() {
  const turn = soon.turn;
  const rows = kinds.map((k) => ({ kind: k.name, error: "…" }));
  const choose = (kind) => { state.kind = kind; $("kind").value = kind; changed("kind"); };
  const next = async (i, isReady) => {
    const began = performance.now();
    try {
      for (; i < rows.length && performance.now() - began < 40; i++, isReady = false) {
        const request = { ask: "row", wanted: wanted(rows[i].kind) };
        if (!isReady && expected(rows[i].kind) >= SLOW) {
          showTable(rows, state.kind, choose);
          await program.ahead([request], true);
          return turn === soon.turn && next(i, true);
        }
        rows[i] = program.ask(request);
      }
    } catch (problem) {
      if (!problem.field) throw problem;
      return grey(Boolean(lacking), true);
    }
    showTable(rows, state.kind, choose);
    if (i < rows.length) redraw.later = setTimeout(() => next(i, false), 0);
  };
  next(0, false);
}

function show(shown, keepView) {
  extent = 1;
  for (const [, answer] of shown) for (const spans of answer.ranks) for (const span of spans) extent = Math.max(extent, span[4]);
  if (!keepView || !view) view = [0, extent * 1.005];
  const inView = new Set(shown.flatMap(([, answer]) => answer.ranks.flat().map((span) => span[0])));
  [...$("legend").children].forEach((item, i) => { item.hidden = i === 11 || i === 15 || !inView.has(i); });
  const host = $("charts");
  while (charts.length > shown.length) charts.pop().figure.remove();
  shown.forEach(([title, answer], i) => {
    if (!charts[i]) { charts[i] = new Chart(host, title); listen(charts[i]); }
    charts[i].title = title;
    charts[i].show(answer, view, { limit: whole("limit", true), path: $("path").checked });
  });
}

// A long text takes a browser longer than the picture: it waits until somebody looks.
const LONG = 50_000;
function fillCsv(text) {
  fillCsv.later = text.length > LONG && !$("editor").open && !$("edit").checked ? text : null;
  $("csv").value = fillCsv.later === null ? text : "";
}
fillCsv.later = null;
function csvText() {
  if (fillCsv.later !== null) { $("csv").value = fillCsv.later; fillCsv.later = null; }
  return $("csv").value;
}

function faults(answer) {
  $("faults").textContent = answer.error || "Proven: complete, in order, free of deadlock.";
  $("faults").className = answer.error ? "bad" : "";
}

// A schedule by hand has its own shape: another one leaves it, other prices price it anew.
const SHAPE = ["kind", "pp", "virtual", "micro_batches", "unit", "slices"];
function changed(key) {
  notice = "";
  readControls();
  // A list is of stages, which have no layers in common.
  if ([...TIMES, ...SIZES].some((one) => state[one].includes(","))) $("per_layer").checked = state.per_layer = false;
  if (editor.on && SHAPE.includes(key)) stopEditing();
  saveAddress();
  redrawSoon();
}

function stopEditing() {
  editor.on = false;
  editor.csv = "";
  $("edit").checked = false;
  $("faults").textContent = "";
}

function zoom(by, at) {
  if (!view) return;
  const middle = at === undefined ? (view[0] + view[1]) / 2 : at;
  const half = (x) => middle + (x - middle) * by;
  view = [Math.max(0, half(view[0])), Math.min(extent * 1.005, half(view[1]))];
  for (const chart of charts) { chart.view = view; chart.draw(); }
}

function shift(by) {
  const length = view[1] - view[0];
  const from = Math.min(Math.max(0, view[0] + by * length), Math.max(0, extent * 1.005 - length));
  view = [from, from + length];
  for (const chart of charts) { chart.view = view; chart.draw(); }
}

// Actions of the schedule that is in the CSV can be moved, and no others.
function editable(chart, hit) {
  const mine = $("edit").checked && chart === charts[0] && !lacking && !soon.waiting;
  return mine && hit && hit.span && isCompute(hit.span);
}

function listen(chart) {
  const canvas = chart.canvas;
  const place = (e) => { const box = canvas.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top].map((x) => x / chart.zoom); };
  let held = null;
  canvas.onpointermove = (e) => {
    const hit = chart.at(...place(e));
    const hover = $("hover");
    hover.hidden = !(hit && hit.span);
    canvas.style.cursor = editable(chart, hit) ? "grab" : "default";
    if (hover.hidden) return;
    hover.textContent = chart.words(hit);
    hover.style.left = Math.min(e.clientX + 14, innerWidth - 360) + "px";
    hover.style.top = Math.min(e.clientY + 14, innerHeight - 120) + "px";
  };
  canvas.onpointerleave = () => { $("hover").hidden = true; };
  canvas.onpointerdown = (e) => {
    const hit = chart.at(...place(e));
    if (editable(chart, hit)) {
      held = hit;
      canvas.setPointerCapture(e.pointerId);
    }
  };
  canvas.onpointerup = (e) => {
    const hit = chart.at(...place(e));
    if (held && editable(chart, held) && hit && hit.rank === held.rank) {
      const spans = chart.answer.ranks[held.rank];
      editor.on = true;
      editor.csv = moved(editor.csv || csvText(), held.rank, computeIndex(spans, held.at), placeAt(spans, hit.t));
      $("csv").value = editor.csv;
      $("editor").open = true;
      redraw(true);
    }
    held = null;
  };
  canvas.addEventListener("wheel", (e) => {
    if (!e.ctrlKey) return;
    e.preventDefault();
    zoom(e.deltaY > 0 ? 1.25 : 0.8, chart.ns(place(e)[0]));
  }, { passive: false });
  canvas.onkeydown = (e) => {
    const keys = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1.4), 0: () => zoom(1e9), ArrowLeft: () => shift(-0.2), ArrowRight: () => shift(0.2) };
    if (keys[e.key]) { e.preventDefault(); keys[e.key](); }
  };
}

function save(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function download(format) {
  if (lacking) return say(lacking, true);
  const csv = editor.on && editor.csv ? editor.csv : null;
  const name = csv ? "by-hand" : `${state.kind}-p${+state.pp}-b${+state.micro_batches}`;
  if (format === "png") return charts[0].canvas.toBlob((blob) => save(name + ".png", blob));
  const asked = wanted(state.kind, csv !== null);
  const answer = program.ask({ ask: "write", csv, format, wanted: asked });
  if (answer.error) return say(answer.error, true);
  save(name + (format === "torch" ? "-torch.csv" : "." + format), answer.text, "text/plain");
}

async function open(file) {
  const answer = program.ask({ ask: "read", text: await file.text(), name: file.name });
  notice = "";
  if (answer.error) return say(answer.error, true);
  if (answer.trace) return openTrace(answer);
  const { pp, micro_batches } = answer;
  Object.assign(state, { pp: String(pp), virtual: String(answer.virtual), micro_batches: String(micro_batches) });
  fillControls();
  editor.on = true;
  editor.csv = answer.csv;
  fillCsv.later = null;
  $("csv").value = answer.csv;
  $("editor").open = true;
  redraw(false);
}

// A trace's step, below a schedule of the same shape that is simulated with the same times.
function openTrace(answer) {
  trace = answer;
  $("untrace").hidden = false;
  const { kind, lower, ...shape } = answer.shape;
  for (const key in shape) state[key] = String(shape[key]);
  for (const key in answer.times ?? {}) state[key] = String(answer.times[key]);
  if (kind) Object.assign(state, { kind, others: [] });
  else notice = `${answer.trace}: of no kind that this page has; ${state.kind} is drawn in its shape`;
  Object.assign(state, { lower, per_layer: false });
  stopEditing();
  fillControls();
  saveAddress();
  redrawSoon();
}

async function copyCommand() {
  // A kind that cannot be drawn cannot be run, either.
  if (lacking && !editor.on) return say(lacking, true);
  const text = command(kinds);
  try { await navigator.clipboard.writeText(text); say("Copied: " + text); } catch { say(text); }
}

// The state that an address tells, as far as there are such kinds.
function fromAddress() {
  notice = loadAddress(kinds);
  fillControls();
}

// About ms that a picture takes: by the last one of its kind, or by what kinds take in general.
const sizeOf = (asked) => asked.pp * (asked.virtual ?? 2) * asked.micro_batches * asked.slices;
function expected(kind) {
  const size = sizeOf(wanted(kind)), last = soon.took.get(kind);
  const general = size * (kind === "auto" ? 1.5 : 0.01);
  const alike = last ? (last.ms * size) / last.size : 0;
  return last && size <= last.size ? alike : Math.max(general, alike);
}

// What takes long waits until the hand rests, and is computed beside the page, which says so.
const SLOW = 400, REST = 300;
const soon = { waiting: 0, turn: 0, took: new Map(), over: null, end: () => {} };

function stopWaiting() {
  clearTimeout(soon.waiting);
  clearTimeout(redraw.later);
  soon.waiting = 0;
  soon.end();
  soon.turn += 1;
  program.giveUp();
  $("picture").removeAttribute("aria-busy");
}

function redrawSoon() {
  let ms = 0;
  const requests = [];
  try {
    for (const kind of [...(editor.on ? [] : [state.kind]), ...state.others]) {
      ms += expected(kind);
      requests.push({ ask: "draw", wanted: wanted(kind) });
    }
  } catch (problem) {
    if (!problem.field) throw problem;
    ms = 0;
  }
  if (ms < SLOW) return redraw(false);
  stopWaiting();
  showControls();
  say("", false);
  grey(true, true);
  $("picture").setAttribute("aria-busy", "true");
  const turn = soon.turn;
  soon.over = new Promise((end) => { soon.end = end; });
  soon.waiting = setTimeout(async () => {
    await program.ahead(requests);
    if (turn === soon.turn) redraw(false);
  }, REST);
}

async function start() {
  await program.start();
  kinds = program.ask({ ask: "kinds" }).kinds;
  $("kind").replaceChildren(...kinds.map((k) => new Option(k.name, k.name)));
  $("preset").replaceChildren(...Object.keys(PRESETS).map((name) => new Option(name || "choose", name)));
  $("others").replaceChildren(...kinds.map((k) => {
    const label = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", value: k.name });
    label.append(box, k.name);
    return label;
  }));
  $("legend").replaceChildren(...KINDS_OF_ACTION.map((name, i) => {
    const item = document.createElement("li"), colour = document.createElement("i");
    colour.style.background = COLOURS[i];
    item.append(colour, name);
    return item;
  }));
  for (const group of document.querySelectorAll("details.group")) group.open = innerWidth > 820;
  fromAddress();
  listenToPage();
  redrawSoon();
  document.body.dataset.ready = "1";
}

function listenToPage() {
  $("controls").addEventListener("input", (e) => {
    const id = e.target.id;
    if (id === "preset") return;
    const key = id.replace("_slide", ""), times = ["t_f", "t_b", "t_w"];
    if (key !== id) $(key).value = +Number(e.target.value).toPrecision(4);
    changed(key);
    if (times.includes(id)) times.forEach(slide);
  });
  $("each").addEventListener("toggle", showStages);
  $("controls").addEventListener("submit", (e) => e.preventDefault());
  $("preset").onchange = () => {
    notice = "";
    state = { ...DEFAULTS, others: [], ...PRESETS[$("preset").value] };
    stopEditing();
    fillControls();
    saveAddress();
    redrawSoon();
  };
  $("csv").oninput = () => { editor.on = true; editor.csv = $("csv").value; redraw(true); };
  // What is being computed will be drawn with it.
  $("path").onchange = () => { if (!soon.waiting) redraw(true); };
  $("editor").addEventListener("toggle", csvText);
  $("edit").onchange = () => {
    if ($("edit").checked && state.lower) { state.lower = false; $("lower").checked = false; redraw(true); }
    if (!$("edit").checked) { stopEditing(); redraw(true); }
  };
  $("zoom_in").onclick = () => zoom(0.6);
  $("zoom_out").onclick = () => zoom(1.6);
  $("zoom_all").onclick = () => zoom(1e9);
  $("copy").onclick = () => guarded(copyCommand);
  for (const button of document.querySelectorAll("[data-save]")) {
    button.onclick = () => guarded(() => download(button.dataset.save));
  }
  $("file").onchange = () => {
    const file = $("file").files[0];
    // The same file, changed meanwhile, can be chosen again.
    $("file").value = "";
    if (file) open(file);
  };
  $("untrace").onclick = () => { trace = null; $("untrace").hidden = true; redraw(false); };
  addEventListener("dragover", (e) => { e.preventDefault(); document.body.classList.add("over"); });
  addEventListener("dragleave", (e) => { if (!e.relatedTarget) document.body.classList.remove("over"); });
  addEventListener("drop", (e) => {
    e.preventDefault();
    document.body.classList.remove("over");
    if (e.dataTransfer.files[0]) open(e.dataTransfer.files[0]);
  });
  addEventListener("hashchange", () => { stopEditing(); fromAddress(); redrawSoon(); });
  addEventListener("resize", () => {
    for (const chart of charts) chart.draw();
    scatter(state.kind);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts) chart.draw(); });
}

start();
