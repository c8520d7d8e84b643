// A schedule by hand: as CSV, or by dragging an action to another place of its rank.
const editor = { on: false, csv: "" };

// The CSV with one action of a rank moved before another one, both by their places among computes.
function moved(csv, rank, from, to) {
  const rows = csv.trimEnd().split("\n").map((line) => line.split(","));
  const row = rows[rank].filter((text) => text.trim() !== "");
  const [action] = row.splice(from, 1);
  row.splice(to > from ? to - 1 : to, 0, action);
  rows[rank] = row;
  const length = Math.max(...rows.map((r) => r.length));
  return rows.map((r) => r.concat(Array(length - r.length).fill("")).join(",")).join("\n") + "\n";
}

// The place among a rank's computes where something dropped at this time goes.
function placeAt(spans, t) {
  const computes = spans.filter(isCompute);
  const at = computes.findIndex((s) => (s[3] + s[4]) / 2 > t);
  return at < 0 ? computes.length : at;
}

function computeIndex(spans, at) {
  return spans.slice(0, at).filter(isCompute).length;
}
