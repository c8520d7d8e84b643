// One schedule on a canvas: lanes of every rank, memory below them, what waited for what.
// Colours that the colour-blind can tell apart, and letters beside them.
const KINDS_OF_ACTION = ["F", "B", "W", "BW", "R", "F&BW", "send activation", "send gradient", "receive activation",
  "receive gradient", "all-gather", "free", "reduce-scatter", "sum over replicas", "optimizer step",
  "validation", "end of reduction", "send the head's input", "send the head's sums", "send log-sum-exp",
  "send the head's gradient", "receive the head's input", "receive the head's sums", "receive log-sum-exp",
  "receive the head's gradient", "copy out", "end of copy out", "copy in"];
const COLOURS = ["#3b8bd0", "#e69f00", "#2aa17b", "#d9640f", "#c678a8", "#8888cc", "#9aa0a6", "#b9a37a", "#c5cad1",
  "#dccfae", "#56b4e9", "#888", "#f0d000", "#b8860b", "#777",
  "#b2182b", "#8e7cb5", "#9aa0a6", "#9aa0a6", "#9aa0a6", "#b9a37a", "#c5cad1", "#c5cad1", "#c5cad1", "#dccfae", "#1b7837", "#a6dba0", "#762a83"];
const LEFT = 58, LANE = 19, THIN = 6, MEMORY = 26, GAP = 7, AXIS = 20, TEXT = 15;
const isCompute = (span) => span[0] <= 5;

class Chart {
  constructor(host, title) {
    this.figure = document.createElement("figure");
    this.caption = document.createElement("figcaption");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.figure.append(this.caption, this.canvas);
    host.append(this.figure);
    this.title = title;
  }

  show(answer, view, options) {
    this.answer = answer;
    this.view = view;
    this.options = options;
    this.program = answer.ranks.some((spans) => spans.some((s) => s[0] >= 6 && s[0] <= 13));
    this.copies = answer.ranks.some((spans) => spans.some((s) => s[0] >= 25));
    this.peak = Math.max(1, options.limit || 0);
    for (const points of answer.memory || []) for (const point of points) this.peak = Math.max(this.peak, point[1]);
    this.index = null;
    this.rows = answer.ranks.map((spans) => this.sorted(spans));
    this.draw();
    this.tell();
  }

  rankHeight() {
    const memory = this.answer.memory && this.answer.memory.some((m) => m.length) ? MEMORY : 0;
    return LANE + (this.program ? (this.copies ? 5 : 4) * THIN + 2 : 0) + memory + GAP;
  }

  x(ns) {
    const [from, to] = this.view;
    return LEFT + ((ns - from) / (to - from)) * (this.width - LEFT - 8);
  }

  ns(x) {
    const [from, to] = this.view;
    return from + ((x - LEFT) / (this.width - LEFT - 8)) * (to - from);
  }

  // Row and height of an action within its rank.
  lane(code) {
    if (code <= 5 || code === 14) return [0, LANE];
    const row = code >= 25 ? 4 : code === 10 || code === 11 ? 0 : code >= 12 ? 1 : code <= 7 ? 2 : 3;
    return [LANE + 1 + row * THIN, THIN - 1];
  }

  // The rows of a rank, each with its spans by their starts and how far those before reach, so that a
  // picture looks at no more than it shows.
  sorted(spans) {
    const rows = new Map();
    for (const span of spans) {
      if (span[0] === 11) continue;
      const [row, tall] = this.lane(span[0]);
      if (!rows.has(row)) rows.set(row, { row, tall, spans: [] });
      rows.get(row).spans.push(span);
    }
    for (const lane of rows.values()) {
      lane.spans.sort((a, b) => a[3] - b[3]);
      let reach = 0;
      lane.reach = Float64Array.from(lane.spans, (span) => (reach = Math.max(reach, span[4])));
    }
    return [...rows.values()];
  }

  draw() {
    // All of a picture grows with the page's text.
    this.zoom = parseFloat(getComputedStyle(document.body).fontSize) / TEXT || 1;
    const scale = Math.min(window.devicePixelRatio || 1, 3) * this.zoom;
    this.width = Math.max(280, (this.canvas.clientWidth || this.figure.clientWidth || 800) / this.zoom);
    const height = AXIS + this.answer.ranks.length * this.rankHeight();
    this.canvas.style.height = height * this.zoom + "px";
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const style = getComputedStyle(document.body);
    this.fore = style.getPropertyValue("--fore");
    this.soft = style.getPropertyValue("--line");
    pen.fillStyle = style.getPropertyValue("--back");
    pen.fillRect(0, 0, this.width, height);
    this.axis(pen, height);
    this.answer.ranks.forEach((spans, rank) => this.rank(pen, spans, rank));
    if (this.options.path) this.criticalPath(pen);
  }

  axis(pen, height) {
    const [from, to] = this.view;
    let step = 1;
    while ((to - from) / step > this.width / 90) step *= String(step)[0] === "2" ? 2.5 : 2;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      pen.fillStyle = this.soft;
      pen.fillRect(this.x(t), AXIS - 4, 1, height);
      pen.fillStyle = this.fore;
      const text = axisTime(t, step, to), half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(this.x(t), this.width - half - 2), 11);
    }
  }

  rank(pen, spans, rank) {
    const top = AXIS + rank * this.rankHeight();
    pen.fillStyle = this.fore;
    pen.textAlign = "left";
    pen.font = "12px system-ui, sans-serif";
    pen.fillText("rank " + rank, 4, top + 14);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, top - 2, this.width - LEFT, this.rankHeight());
    pen.clip();
    pen.textAlign = "center";
    const stages = this.answer.placement.map((p, s) => (p === rank ? s : -1)).filter((s) => s >= 0);
    const shade = new Map(stages.map((s, i) => [s, stages.length > 1 ? 1 - 0.45 * (i / (stages.length - 1)) : 1]));
    pen.font = "11px system-ui, sans-serif";
    for (const lane of this.rows[rank]) this.row(pen, lane, top, shade);
    this.memory(pen, rank, top + this.rankHeight() - GAP);
    pen.restore();
  }

  // What is in view of one row. What is thinner than half a point beside what is drawn would not be seen.
  row(pen, { row, tall, spans, reach }, top, shade) {
    let drawn = -Infinity;
    for (let i = firstFrom(reach, this.view[0]); i < spans.length && spans[i][3] <= this.view[1]; i++) {
      const [code, stage, microBatch, start, end] = spans[i];
      const left = this.x(start), width = Math.max(0.6, this.x(end) - left);
      if (left + width < drawn + 0.5) continue;
      drawn = left + width;
      const opaque = code <= 5 ? shade.get(stage) ?? 1 : 1, wide = width > 3 ? width - 0.7 : width;
      // A shade is lighter on any ground, for the numbers.
      if (opaque < 1) {
        pen.fillStyle = "#fff";
        pen.fillRect(left, top + row, wide, tall);
      }
      pen.globalAlpha = opaque;
      pen.fillStyle = COLOURS[code];
      pen.fillRect(left, top + row, wide, tall);
      if (code <= 5 && width > 15) {
        pen.globalAlpha = 1;
        pen.fillStyle = "#000";
        pen.fillText(width > 34 ? KINDS_OF_ACTION[code] + microBatch : String(microBatch), left + width / 2, top + 14);
      }
    }
    pen.globalAlpha = 1;
  }

  memory(pen, rank, base) {
    const points = this.answer.memory && this.answer.memory[rank];
    if (!points || !points.length) return;
    const y = (bytes) => base - ((MEMORY - 4) * bytes) / this.peak;
    let i = Math.max(0, firstFrom(points, this.view[0], (point) => point[0]) - 1);
    let level = i ? y(points[i - 1][1]) : base, x = this.x(points[i][0]);
    pen.beginPath();
    pen.moveTo(x, base);
    for (; i < points.length && points[i][0] <= this.view[1]; i++) {
      const at = this.x(points[i][0]), next = y(points[i][1]);
      // Within one pixel column the most is what counts.
      if (Math.floor(at) === Math.floor(x) && next > level && i + 1 < points.length) continue;
      x = at;
      pen.lineTo(x, level);
      pen.lineTo(x, next);
      level = next;
    }
    x = i < points.length ? this.width : x;
    pen.lineTo(x, level);
    pen.lineTo(x, base);
    pen.globalAlpha = 0.35;
    pen.fillStyle = "#8888cc";
    pen.fill();
    pen.globalAlpha = 1;
    if (this.options.limit) {
      pen.strokeStyle = "#d55e00";
      pen.setLineDash([5, 3]);
      pen.beginPath();
      pen.moveTo(LEFT, y(this.options.limit));
      pen.lineTo(this.width, y(this.options.limit));
      pen.stroke();
      pen.setLineDash([]);
    }
  }

  // Where every compute stands, by what, stage and micro-batch.
  places() {
    if (this.index) return this.index;
    this.index = new Map();
    this.answer.ranks.forEach((spans, rank) => spans.forEach((span, at) => {
      if (!isCompute(span)) return;
      const put = (letter, stage, microBatch) => this.index.set(`${letter}${stage}.${microBatch}`, [rank, at]);
      const [code, stage, microBatch] = span;
      if (code === 0) put("F", stage, microBatch);
      if (code === 1 || code === 3) put("B", stage, microBatch);
      if (code === 2 || code === 3) put("W", stage, microBatch);
      if (code === 5) { put("F", stage, microBatch); put("B", span[5], span[6]); }
    }));
    return this.index;
  }

  // What an action began right after: [rank, index, why], or null at the start.
  cause(rank, at) {
    const spans = this.answer.ranks[rank], span = spans[at];
    let before = at - 1;
    while (before >= 0 && !isCompute(spans[before])) before--;
    if (before >= 0 && spans[before][4] === span[3]) return [rank, before, "the rank was busy"];
    for (let i = at - 1; i >= 0; i--) {
      if (spans[i][0] === 10 && spans[i][1] === span[1]) {
        if (spans[i][4] === span[3] && span[0] !== 2) return [rank, i, "its weights were on their way"];
        break;
      }
    }
    const last = this.answer.placement.length - 1;
    const key = span[0] === 0 ? (span[1] > 0 ? `F${span[1] - 1}.${span[2]}` : null)
      : span[0] === 1 || span[0] === 3 ? (span[1] < last ? `B${span[1] + 1}.${span[2]}` : `F${span[1]}.${span[2]}`) : null;
    const from = key && this.places().get(key);
    return from ? [...from, "it waited for this"] : before >= 0 ? [rank, before, "the rank was busy"] : null;
  }

  // What needs this action's result.
  waits(span) {
    const last = this.answer.placement.length - 1;
    const key = span[0] === 0 ? (span[1] < last ? `F${span[1] + 1}.${span[2]}` : `B${span[1]}.${span[2]}`)
      : (span[0] === 1 || span[0] === 3) && span[1] > 0 ? `B${span[1] - 1}.${span[2]}` : null;
    return key && this.places().get(key);
  }

  criticalPath(pen) {
    let place = null, end = -1;
    this.answer.ranks.forEach((spans, rank) => spans.forEach((span, at) => {
      if (isCompute(span) && span[4] > end) { end = span[4]; place = [rank, at]; }
    }));
    pen.strokeStyle = this.fore;
    pen.lineWidth = 2;
    pen.beginPath();
    for (let n = 0; place && n < 20000; n++) {
      const [rank, at] = place, span = this.answer.ranks[rank][at];
      const y = AXIS + rank * this.rankHeight() + this.lane(span[0])[0] + 4;
      if (n === 0) pen.moveTo(this.x(span[4]), y); else pen.lineTo(this.x(span[4]), y);
      pen.lineTo(this.x(span[3]), y);
      place = this.cause(rank, at);
    }
    pen.stroke();
    pen.lineWidth = 1;
  }

  at(x, y) {
    const rank = Math.floor((y - AXIS) / this.rankHeight());
    const spans = this.answer.ranks[rank];
    if (!spans) return null;
    const inside = y - AXIS - rank * this.rankHeight(), t = this.ns(x);
    const at = spans.findIndex((s) => {
      const [row, tall] = this.lane(s[0]);
      return s[0] !== 11 && inside >= row && inside < row + tall + 1 && t >= s[3] && t <= s[4];
    });
    return at < 0 ? { rank, t, at: -1 } : { rank, t, at, span: spans[at] };
  }

  name(rank, span) {
    const n = this.answer.slices ?? 1, [sample, slice] = [Math.floor(span[2] / n), span[2] % n];
    const what = n > 1 ? `slice ${slice} of sample ${sample}` : `micro-batch ${span[2]}`;
    const micro = span[2] >= 0 ? `, ${what}` : "";
    // An optimizer step is of all stages of its rank.
    const stage = span[1] >= 0 ? ` of stage ${span[1]}` : "";
    return `${KINDS_OF_ACTION[span[0]]}${stage}${micro} on rank ${rank}`;
  }

  words(hit) {
    const { rank, at, span } = hit;
    const [start, end, length] = [span[3], span[4], span[4] - span[3]].map(exactTime);
    const lines = [this.name(rank, span), `${start} to ${end}, ${length}`];
    if (isCompute(span)) {
      const cause = this.cause(rank, at);
      if (cause) lines.push(`began after ${this.name(cause[0], this.answer.ranks[cause[0]][cause[1]])}: ${cause[2]}`);
      const next = this.waits(span);
      if (next) lines.push(`waited for by ${this.name(next[0], this.answer.ranks[next[0]][next[1]])}`);
    }
    return lines.join("\n");
  }

  tell() {
    const n = this.answer.numbers, told = [];
    const share = (x) => (100 * x).toFixed(1) + " %";
    if (n) {
      told.push(["makespan " + time(n.makespan), "From time 0 to the last end over all ranks"],
        ["own span " + time(n.own_span), "The largest time between a rank's first start and its last end"],
        ["bubble " + share(n.bubble), "Idle share of all ranks from the first start to the last end of any"],
        ["own-span bubble " + share(n.bubble_own_span), "Idle share between a rank's own first start and last end, averaged over ranks"],
        ["printed rate " + share(n.bubble_rate), "(cost − work) / cost as the schedule's own paper counts it"],
        ["peak " + n.peak, "Most activations and weight stashes of a rank at once, in the unit of the sizes"],
        [`V ${n.virtual}`, "Stages on each rank"]);
      if (n.gathers) told.push([`${n.gathers} gathers, ${n.reductions} reductions`, "Of the program, over all pipeline ranks"]);
    } else {
      told.push(["bubble " + share(this.answer.bubble), "Idle share of all ranks, measured"], ["own-span bubble " + share(this.answer.own_span), "Measured"],
        ...this.answer.facts.map((fact) => [fact, "As the trace says"]));
    }
    const title = document.createElement("b");
    title.textContent = this.title;
    this.caption.replaceChildren(title, ...told.flatMap(([text, why]) => {
      const span = document.createElement("span");
      span.textContent = text;
      span.title = why;
      return [" ", span];
    }));
    this.canvas.setAttribute("aria-label", `${this.title}: ${told.map((t) => t[0]).join(", ")}`);
  }
}

// The first place of a list in order from which its numbers are at least this one.
function firstFrom(list, least, of = (x) => x) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (of(list[middle]) < least) low = middle + 1; else high = middle;
  }
  return low;
}

function time(ns) {
  if (ns >= 1e9) return +(ns / 1e9).toFixed(3) + " s";
  if (ns >= 1e6) return +(ns / 1e6).toFixed(2) + " ms";
  return +(ns / 1e3).toFixed(2) + " µs";
}

// A time on an axis: in the unit of its end, with the digits that its step needs.
function axisTime(ns, step, end) {
  const units = [["s", 1e9], ["ms", 1e6], ["µs", 1e3], ["ns", 1]];
  const [unit, size] = units.find((u) => end >= u[1]) ?? units[3];
  const digits = Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9));
  return `${ns ? (ns / size).toFixed(digits) : 0} ${unit}`;
}

// A time to the nanosecond.
function exactTime(ns) {
  if (ns < 1e3) return ns + " ns";
  return (ns / 1e3).toLocaleString("en", { maximumFractionDigits: 3 }) + " µs";
}
