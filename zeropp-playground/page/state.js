// What is asked for: the controls, the address, the presets.
const FIELDS = ["kind", "pp", "virtual", "micro_batches", "unit", "layers", "t_f", "t_b", "t_w", "t_comm",
  "t_gather", "t_reduce", "t_step", "mem_f", "mem_w", "mem_input", "limit", "prefetch"];
const SWITCHES = ["per_layer", "lower", "recompute"];
const DEFAULTS = { kind: "zeropp", pp: "4", virtual: "", micro_batches: "14", unit: "7", layers: "24", t_f: "100",
  t_b: "100", t_w: "100", t_comm: "0", t_gather: "0", t_reduce: "0", t_step: "0", mem_f: "2", mem_w: "-1",
  mem_input: "0", limit: "", prefetch: "1", per_layer: false, lower: false, recompute: false, others: [] };
const ZERO_BUBBLE = { t_f: "18522", t_b: "18086", t_w: "9337", t_comm: "601", pp: "8", micro_batches: "24", unit: "" };
const BIG = { t_f: "11347", t_b: "11248", t_w: "8132", t_comm: "377", pp: "16", micro_batches: "48", unit: "", virtual: "" };
const PRESETS = {
  "": {},
  "ZeroPP, figure 2: three schedules": { kind: "zeropp", pp: "4", virtual: "2", micro_batches: "14", unit: "7",
    others: ["bf-pp", "gpipe"] },
  "ZeroPP: units too small, right, too large": { kind: "zeropp", pp: "4", virtual: "2", micro_batches: "16", unit: "4" },
  "Zero Bubble: 1F1B, ZB-H1, ZB-H2": { kind: "1f1b", pp: "4", micro_batches: "8", others: ["zb-h1", "zb-h2"] },
  "Zero Bubble: the 1.5B profile": { ...ZERO_BUBBLE, kind: "zb-2p", others: ["1f1b", "zb-1p"] },
  "Zero Bubble: the 14.6B profile": { ...BIG, kind: "zb-2p", others: ["1f1b", "zb-1p"] },
  "14.6B: ZeroPP with gathers and recomputation": { ...BIG, kind: "zeropp", pp: "4", virtual: "2", micro_batches: "24",
    unit: "8", t_gather: "9000", t_reduce: "18000", lower: true, recompute: true, mem_input: "1", mem_f: "16", mem_w: "-8" },
  "ZeroPP against ZB-V, the same 48 layers": { ...BIG, kind: "zeropp", pp: "4", virtual: "2", micro_batches: "16",
    unit: "8", others: ["zb-v"], per_layer: true, layers: "48", t_f: "1000", t_b: "991", t_w: "717" },
  "ZeroPP against ZB-V under 13 GB (sizes in MB)": { ...BIG, kind: "zeropp", pp: "4", virtual: "6", micro_batches: "24",
    unit: "8", others: ["zb-v"], per_layer: true, layers: "48", t_f: "946", t_b: "937", t_w: "678", t_gather: "750",
    t_reduce: "1500", lower: true, recompute: true, mem_f: "178", mem_w: "-89", mem_input: "10", limit: "13000" },
  "The same model for every kind": { kind: "zeropp", pp: "4", virtual: "2", micro_batches: "16", unit: "8",
    per_layer: true, layers: "24", others: ["1f1b", "interleaved", "zb-v"] },
};
let state = { ...DEFAULTS };

function loadAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  state = { ...DEFAULTS, others: [] };
  for (const key of FIELDS) if (given.has(key)) state[key] = given.get(key);
  for (const key of SWITCHES) if (given.has(key)) state[key] = given.get(key) === "1";
  if (given.has("others")) state.others = given.get("others").split(",").filter(Boolean);
}

function saveAddress() {
  const told = new URLSearchParams();
  for (const key of FIELDS) if (state[key] !== DEFAULTS[key]) told.set(key, state[key]);
  for (const key of SWITCHES) if (state[key] !== DEFAULTS[key]) told.set(key, state[key] ? "1" : "0");
  if (state.others.length) told.set("others", state.others.join(","));
  history.replaceState(null, "", "#" + told);
}

// One number, or a list of them; null where it is neither.
function numbers(text) {
  const list = String(text).split(",").map((x) => (x.trim() === "" ? NaN : Number(x)));
  if (list.some((x) => !Number.isFinite(x))) return null;
  return list.length === 1 ? list[0] : list;
}

function whole(text) {
  const n = Number(text);
  return String(text).trim() !== "" && Number.isInteger(n) && n >= 0 ? n : null;
}

// The request for a kind; an error where a control has no number.
function wanted(kind) {
  const costs = {};
  for (const key of ["t_f", "t_b", "t_w", "t_comm", "t_gather", "t_reduce", "t_step", "mem_f", "mem_w", "mem_input"]) {
    const value = numbers(state[key]);
    if (value === null) throw { field: key, text: `${key} = ${state[key]}: use a number, or one for each stage, such as 5,5,6` };
    costs[key] = value;
  }
  // What B frees follows: the three sum to nothing.
  const each = (f, w) => (Array.isArray(f) ? f.map((x, i) => -x - (Array.isArray(w) ? w[i] : w)) : Array.isArray(w) ? w.map((x) => -f - x) : -f - w);
  costs.mem_b = each(costs.mem_f, costs.mem_w);
  const need = (key, least = 1) => {
    const n = whole(state[key]);
    if (n === null || n < least) throw { field: key, text: `${key} = ${state[key] || "nothing"}: use a whole number from ${least} on` };
    return n;
  };
  return { kind, pp: need("pp"), virtual: whole(state.virtual), micro_batches: need("micro_batches"),
    unit: whole(state.unit), costs, layers: state.per_layer ? need("layers") : null, limit: whole(state.limit),
    lower: state.lower, recompute: state.recompute, prefetch: need("prefetch", 0) };
}

function command(kinds) {
  const row = kinds.find((k) => k.name === state.kind);
  const v = row.only ? row.stages : Number(state.virtual) || row.stages;
  const parts = [`zeropp run --pp ${state.pp} --virtual ${v} --schedule ${state.kind} --micro-batches ${state.micro_batches}`];
  if (row.units && state.unit) parts.push(`--unit ${state.unit}`);
  if (state.recompute) parts.push("--recompute full");
  if (state.prefetch !== "1") parts.push(`--prefetch ${state.prefetch}`);
  parts.push(`--layers ${state.per_layer ? state.layers : Number(state.pp) * v}`);
  return parts.join(" ");
}
