// What is asked for: the controls, the address, the presets.
const FIELDS = ["kind", "pp", "virtual", "micro_batches", "unit", "slices", "pairs", "layers", "t_f", "t_b", "t_w", "t_comm",
  "t_gather", "t_reduce", "t_step", "mem_f", "mem_w", "mem_input", "limit", "prefetch"];
const SWITCHES = ["per_layer", "lower", "recompute"];
const DEFAULTS = { kind: "zeropp", pp: "4", virtual: "", micro_batches: "14", unit: "7", slices: "1", pairs: "0", layers: "", t_f: "100",
  t_b: "100", t_w: "100", t_comm: "0", t_gather: "0", t_reduce: "0", t_step: "0", mem_f: "2", mem_w: "-1",
  mem_input: "0", limit: "", prefetch: "1", per_layer: true, lower: false, recompute: false, others: [] };
// The papers give times of a stage of each kind.
const PAPER = { per_layer: false };
const ZERO_BUBBLE = { ...PAPER, t_f: "18522", t_b: "18086", t_w: "9337", t_comm: "601", pp: "8", micro_batches: "24", unit: "" };
const BIG = { ...PAPER, t_f: "11347", t_b: "11248", t_w: "8132", t_comm: "377", pp: "16", micro_batches: "48", unit: "", virtual: "" };
const PRESETS = {
  "": {},
  "ZeroPP, figure 2: three schedules": { ...PAPER, kind: "zeropp", pp: "4", virtual: "2", micro_batches: "14", unit: "7",
    others: ["bf-pp", "gpipe"] },
  "ZeroPP: units too small, right, too large": { ...PAPER, kind: "zeropp", pp: "4", virtual: "2", micro_batches: "16", unit: "4" },
  "Zero Bubble: 1F1B, ZB-H1, ZB-H2": { ...PAPER, kind: "1f1b", pp: "4", micro_batches: "8", others: ["zb-h1", "zb-h2"] },
  "Zero Bubble: the 1.5B profile": { ...ZERO_BUBBLE, kind: "zb-2p", others: ["1f1b", "zb-1p"] },
  "Zero Bubble: the 14.6B profile": { ...BIG, kind: "zb-2p", others: ["1f1b", "zb-1p"] },
  "14.6B: ZeroPP with gathers and recomputation": { ...BIG, kind: "zeropp", pp: "4", virtual: "2", micro_batches: "24",
    unit: "8", t_gather: "9000", t_reduce: "18000", lower: true, recompute: true, mem_input: "1", mem_f: "16", mem_w: "-8" },
  "ZeroPP against ZB-V, the same 48 layers": { ...BIG, kind: "zeropp", pp: "4", virtual: "2", micro_batches: "16",
    unit: "8", others: ["zb-v"], per_layer: true, layers: "48", t_f: "1000", t_b: "991", t_w: "717" },
  "ZeroPP against ZB-V under 13 GB (sizes in MB)": { ...BIG, kind: "zeropp", pp: "4", virtual: "6", micro_batches: "24",
    unit: "8", others: ["zb-v"], per_layer: true, layers: "48", t_f: "946", t_b: "937", t_w: "678", t_gather: "750",
    t_reduce: "1500", lower: true, recompute: true, mem_f: "178", mem_w: "-89", mem_input: "10", limit: "13000" },
  "A long sample: whole, and in 8 slices": { kind: "zeropp", pp: "4", virtual: "2", micro_batches: "2", unit: "",
    slices: "8", pairs: "60", layers: "32", others: ["1f1b", "zb-v"] },
  "The same model for every kind": { kind: "zeropp", pp: "4", virtual: "2", micro_batches: "16", unit: "8",
    per_layer: true, layers: "24", others: ["1f1b", "interleaved", "zb-v"] },
};
let state = { ...DEFAULTS };

// Takes the state that an address has; what is wrong with it, in a line each.
function loadAddress(kinds) {
  const given = new URLSearchParams(location.hash.slice(1)), wrong = [];
  state = { ...DEFAULTS, others: [] };
  for (const key of FIELDS) if (given.has(key)) state[key] = given.get(key);
  for (const key of SWITCHES) if (given.has(key)) state[key] = given.get(key) === "1";
  if (given.has("others")) state.others = given.get("others").split(",").filter(Boolean);
  const names = kinds.map((k) => k.name), known = (name) => names.includes(name);
  const works = `use ${names.join(", ")}`;
  if (!known(state.kind)) wrong.push(`kind = ${state.kind}: no such kind, ${DEFAULTS.kind} is drawn; ${works}`);
  for (const name of state.others.filter((name) => !known(name))) wrong.push(`others = ${name}: no such kind; ${works}`);
  for (const key of given.keys()) {
    if (![...FIELDS, ...SWITCHES, "others"].includes(key)) wrong.push(`${key}: the address has no such field`);
  }
  if (!known(state.kind)) state.kind = DEFAULTS.kind;
  state.others = state.others.filter(known);
  return wrong.join("\n");
}

// Layers of which stages of one and of two a rank, and of V, have the same number each: all kinds run
// the same model.
function fewestLayers(pp, v) {
  return pp * (v % 2 ? 2 * v : v);
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

// What is wrong with a field, in the form of the program's own messages.
function refused(field, problem, works) {
  const unreadable = document.getElementById(field).validity.badInput;
  const told = String(state[field]).trim() || (unreadable ? "?" : "nothing");
  return { field, text: `${field} = ${told}: ${problem}; ${works}` };
}

// A whole number within the bounds of its field; null where nothing is given and nothing need be.
function whole(key, optional) {
  const field = document.getElementById(key), text = String(state[key]).trim();
  // Browsers give no text for what is no number at all.
  const empty = text === "" && !field.validity.badInput;
  if (empty && optional) return null;
  const least = Number(field.min), most = Number(field.max || Number.MAX_SAFE_INTEGER);
  const range = `a whole number from ${least} ${field.max ? `to ${most}` : "on"}`;
  const works = `use ${range}${optional ? ", or leave it empty" : ""}`;
  const n = text === "" ? NaN : Number(text);
  if (!Number.isInteger(n)) throw refused(key, empty ? "missing" : "not a whole number", works);
  if (n < least || n > most) throw refused(key, n < least ? "too small" : "too large", works);
  return n;
}

// A number that may be left out. No fault where no kind in view has it, and nobody could mend it.
function perhaps(key) {
  try {
    return whole(key, true);
  } catch (problem) {
    if (document.getElementById(key).disabled) return null;
    throw problem;
  }
}

const TIMES = ["t_f", "t_b", "t_w", "t_comm", "t_gather", "t_reduce", "t_step"];
const SIZES = ["mem_f", "mem_w", "mem_input"];
const OF_ALL_STAGES = ["t_comm", "t_step"];

function costsOfControls() {
  const costs = {};
  for (const key of [...TIMES, ...SIZES]) {
    const value = numbers(state[key]), one = OF_ALL_STAGES.includes(key);
    const works = one ? "use a number" : "use a number, or one for each stage, such as 5,5,6";
    if (value === null) throw refused(key, "not a number", works);
    if (one && Array.isArray(value)) throw refused(key, "a list", "use one number for all stages");
    const list = [value].flat();
    if (SIZES.includes(key) && !list.every(Number.isSafeInteger)) {
      throw refused(key, "not whole", "use whole numbers, of a smaller unit if need be");
    }
    const negative = TIMES.includes(key) && list.some((x) => x < 0);
    if (negative) throw refused(key, "below 0", "use 0 or more");
    costs[key] = value;
  }
  // What B frees follows: the three sum to nothing.
  const [f, w] = [costs.mem_f, costs.mem_w];
  if (Array.isArray(f) && Array.isArray(w) && f.length !== w.length) {
    const problem = `${w.length} numbers beside ${f.length} of mem_f`;
    throw refused("mem_w", problem, "use one for each stage in both");
  }
  const of = (x, i) => (Array.isArray(x) ? x[i] : x);
  const stages = Array.isArray(f) ? f : w;
  costs.mem_b = Array.isArray(stages) ? stages.map((_, i) => -of(f, i) - of(w, i)) : -f - w;
  return costs;
}

// Whether a kind has its samples in slices; those of the other kinds stay whole.
function sliced(kind) {
  return whole("slices") > 1 && kinds.find((k) => k.name === kind).slices;
}

// The request for a kind, or for the costs of a schedule by hand, which has its own P, V, B and U.
// An error where a control has no number that it can have.
function wanted(kind, byHand) {
  const shape = byHand ? { pp: 1, virtual: null, micro_batches: 1, unit: null }
    : { pp: whole("pp"), virtual: perhaps("virtual"), micro_batches: whole("micro_batches"),
      unit: perhaps("unit") };
  // A schedule by hand has the times of the one that it was made from.
  const fewest = fewestLayers(whole("pp"), perhaps("virtual") ?? 2), { lower, recompute } = state;
  const layers = state.per_layer ? whole("layers", true) ?? fewest : null;
  const slices = !byHand && sliced(kind) ? whole("slices") : 1;
  return { kind, ...shape, slices, pairs: whole("pairs"), costs: costsOfControls(), layers, limit: whole("limit", true), lower,
    recompute, prefetch: whole("prefetch") };
}

// The field that an error of the program is about, by the name before its value; else null.
const FIELD_OF = { "micro-batches": "micro_batches", mem_limit: "limit", mem_b: "mem_w" };
function fieldOf(error) {
  for (const [, name] of error.matchAll(/([A-Za-z][\w-]*)(?: = |: found )/g)) {
    const field = FIELD_OF[name] ?? name;
    if (FIELDS.includes(field)) return field;
  }
  return / and B \d+ make more than /.test(error) ? "micro_batches" : null;
}

// An error where a field has a number that no command can have.
function command(kinds) {
  const row = kinds.find((k) => k.name === state.kind), asked = wanted(state.kind);
  const v = row.only ? row.stages : asked.virtual ?? row.stages;
  const parts = [`zeropp run --pp ${asked.pp} --virtual ${v} --schedule ${state.kind}${asked.slices > 1 ? `:slices=${asked.slices}` : ""}`];
  parts.push(`--micro-batches ${asked.micro_batches}`);
  if (row.units && asked.unit !== null) parts.push(`--unit ${asked.unit}`);
  if (state.recompute) parts.push("--recompute full");
  if (asked.prefetch !== 1) parts.push(`--prefetch ${asked.prefetch}`);
  parts.push(`--layers ${asked.layers ?? asked.pp * v}`);
  return parts.join(" ");
}
