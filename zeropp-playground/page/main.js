// Controls to requests, answers to pictures.
const STAGES_MAX = 64;
let kinds = [], charts = [], view = null, extent = 1, trace = null;
const $ = (id) => document.getElementById(id);

function fillControls() {
  for (const key of FIELDS) $(key).value = state[key];
  for (const key of SWITCHES) $(key).checked = state[key];
  for (const key of ["t_f", "t_b", "t_w"]) slide(key);
  for (const box of $("others").querySelectorAll("input")) box.checked = state.others.includes(box.value);
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
  const n = charts.length && charts[0].answer.placement ? charts[0].answer.placement.length : 0;
  $("each").hidden = state.per_layer || !n || n > STAGES_MAX;
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
      changed();
    };
    row.append(slider);
  }
  return row;
}

function readControls() {
  for (const key of FIELDS) state[key] = $(key).value;
  for (const key of SWITCHES) state[key] = $(key).checked;
  state.others = [...$("others").querySelectorAll("input:checked")].map((box) => box.value);
}

function say(text, bad) {
  $("message").textContent = text;
  $("message").className = bad ? "bad" : "";
}

function redraw(keepView) {
  const began = performance.now();
  const row = kinds.find((k) => k.name === state.kind);
  $("about").textContent = row ? row.about : "";
  $("virtual").disabled = row && row.only;
  $("unit").disabled = !(row && row.units);
  $("layers").disabled = !state.per_layer;
  for (const input of $("controls").querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  const shown = [];
  let failed = "";
  const add = (title, answer) => {
    if (answer.error) failed = failed || `${title}: ${answer.error}`;
    else shown.push([title, answer]);
  };
  try {
    if (editor.on && editor.csv) {
      const answer = program.ask({ ask: "edit", csv: editor.csv, wanted: wanted(state.kind) });
      faults(answer);
      add("by hand", answer);
    } else add(state.kind, program.ask({ ask: "draw", wanted: wanted(state.kind) }));
    for (const kind of state.others) if (kind !== state.kind || editor.on) add(kind, program.ask({ ask: "draw", wanted: wanted(kind) }));
    if (trace) add(trace.trace + ", measured", trace);
  } catch (problem) {
    if (!problem.field) throw problem;
    $(problem.field).setAttribute("aria-invalid", "true");
    say(problem.text, true);
    return;
  }
  if (shown.length) show(shown, keepView);
  showStages();
  say(failed || "", Boolean(failed));
  if (shown.length && !editor.on) { editor.csv = ""; fillCsv(shown[0][1].csv || ""); }
  $("picture").dataset.ms = (performance.now() - began).toFixed(1);
  clearTimeout(redraw.later);
  redraw.later = setTimeout(updateTable, 120);
}

// The table fills row by row, so that the page answers meanwhile; a change begins anew.
function updateTable() {
  const rows = kinds.map((k) => ({ kind: k.name, error: "…" }));
  const choose = (kind) => { state.kind = kind; $("kind").value = kind; changed(); };
  const next = (i) => {
    const began = performance.now();
    try {
      for (; i < rows.length && performance.now() - began < 40; i++) rows[i] = program.ask({ ask: "row", wanted: wanted(rows[i].kind) });
    } catch (problem) {
      if (!problem.field) throw problem;
      return;
    }
    showTable(rows, state.kind, choose);
    if (i < rows.length) redraw.later = setTimeout(() => next(i), 0);
  };
  next(0);
}

function show(shown, keepView) {
  extent = 1;
  for (const [, answer] of shown) for (const spans of answer.ranks) for (const span of spans) extent = Math.max(extent, span[4]);
  if (!keepView || !view) view = [0, extent * 1.005];
  const host = $("charts");
  while (charts.length > shown.length) charts.pop().figure.remove();
  shown.forEach(([title, answer], i) => {
    if (!charts[i]) { charts[i] = new Chart(host, title); listen(charts[i]); }
    charts[i].title = title;
    charts[i].show(answer, view, { limit: whole(state.limit), path: $("path").checked });
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

function changed() {
  readControls();
  if (editor.on) stopEditing();
  saveAddress();
  redraw(false);
}

function stopEditing() {
  editor.on = false;
  editor.csv = "";
  $("edit").checked = false;
  $("faults").textContent = "";
}

function zoom(by, at) {
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

function listen(chart) {
  const canvas = chart.canvas;
  const place = (e) => { const box = canvas.getBoundingClientRect(); return [e.clientX - box.left, e.clientY - box.top].map((x) => x / chart.zoom); };
  let held = null;
  canvas.onpointermove = (e) => {
    const hit = chart.at(...place(e));
    const hover = $("hover");
    hover.hidden = !(hit && hit.span);
    canvas.style.cursor = $("edit").checked && hit && hit.span && isCompute(hit.span) ? "grab" : "default";
    if (hover.hidden) return;
    hover.textContent = chart.words(hit);
    hover.style.left = Math.min(e.clientX + 14, innerWidth - 360) + "px";
    hover.style.top = Math.min(e.clientY + 14, innerHeight - 120) + "px";
  };
  canvas.onpointerleave = () => { $("hover").hidden = true; };
  canvas.onpointerdown = (e) => {
    const hit = chart.at(...place(e));
    if ($("edit").checked && chart === charts[0] && hit && hit.span && isCompute(hit.span)) {
      held = hit;
      canvas.setPointerCapture(e.pointerId);
    }
  };
  canvas.onpointerup = (e) => {
    const hit = chart.at(...place(e));
    if (held && hit && hit.rank === held.rank) {
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
  const name = `${state.kind}-p${state.pp}-b${state.micro_batches}`;
  if (format === "png") return charts[0].canvas.toBlob((blob) => save(name + ".png", blob));
  const csv = editor.on ? editor.csv : null;
  const answer = program.ask({ ask: "write", csv, format, wanted: wanted(state.kind) });
  if (answer.error) return say(answer.error, true);
  save(name + (format === "torch" ? "-torch.csv" : "." + format), answer.text, "text/plain");
}

async function open(file) {
  const answer = program.ask({ ask: "read", text: await file.text(), name: file.name });
  if (answer.error) return say(answer.error, true);
  if (answer.trace) {
    trace = answer;
    return redraw(false);
  }
  Object.assign(state, { pp: String(answer.pp), micro_batches: String(answer.micro_batches) });
  fillControls();
  editor.on = true;
  editor.csv = answer.csv;
  fillCsv.later = null;
  $("csv").value = answer.csv;
  $("editor").open = true;
  redraw(false);
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
    item.hidden = i === 11;
    return item;
  }));
  loadAddress();
  if (!kinds.some((k) => k.name === state.kind)) state.kind = DEFAULTS.kind;
  fillControls();
  $("controls").addEventListener("input", (e) => {
    if (e.target.id === "preset") return;
    if (e.target.id.endsWith("_slide")) $(e.target.id.replace("_slide", "")).value = +Number(e.target.value).toPrecision(4);
    changed();
    const times = ["t_f", "t_b", "t_w"];
    if (times.includes(e.target.id)) times.forEach(slide);
  });
  $("each").addEventListener("toggle", showStages);
  $("controls").addEventListener("submit", (e) => e.preventDefault());
  $("preset").onchange = () => {
    state = { ...DEFAULTS, others: [], ...PRESETS[$("preset").value] };
    stopEditing();
    fillControls();
    saveAddress();
    redraw(false);
  };
  $("csv").oninput = () => { editor.on = true; editor.csv = $("csv").value; redraw(true); };
  $("path").onchange = () => redraw(true);
  $("editor").addEventListener("toggle", csvText);
  $("edit").onchange = () => {
    if ($("edit").checked && state.lower) { state.lower = false; $("lower").checked = false; redraw(true); }
    if (!$("edit").checked) { stopEditing(); redraw(true); }
  };
  $("zoom_in").onclick = () => zoom(0.6);
  $("zoom_out").onclick = () => zoom(1.6);
  $("zoom_all").onclick = () => zoom(1e9);
  $("copy").onclick = async () => {
    const text = command(kinds);
    try { await navigator.clipboard.writeText(text); say("Copied: " + text); } catch { say(text); }
  };
  for (const button of document.querySelectorAll("[data-save]")) button.onclick = () => download(button.dataset.save);
  $("file").onchange = () => $("file").files[0] && open($("file").files[0]);
  addEventListener("dragover", (e) => { e.preventDefault(); document.body.classList.add("over"); });
  addEventListener("dragleave", (e) => { if (!e.relatedTarget) document.body.classList.remove("over"); });
  addEventListener("drop", (e) => {
    e.preventDefault();
    document.body.classList.remove("over");
    if (e.dataTransfer.files[0]) open(e.dataTransfer.files[0]);
  });
  addEventListener("hashchange", () => { loadAddress(); fillControls(); redraw(false); });
  addEventListener("resize", () => { for (const chart of charts) chart.draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const chart of charts) chart.draw(); });
  redraw(false);
  document.body.dataset.ready = "1";
}

start();
