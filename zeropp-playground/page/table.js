// All kinds, sortable, and their bubble over memory.
const COLUMNS = [["kind", "Kind"], ["virtual", "V"], ["makespan", "Makespan"], ["own_span", "Own span"],
  ["bubble", "Bubble"], ["bubble_own_span", "Own-span bubble"], ["bubble_rate", "Printed rate"], ["peak", "Peak"],
  ["gathers", "Gathers"], ["reductions", "Reductions"]];
// Columns that a narrow window leaves out.
const LESS = ["virtual", "own_span", "bubble_own_span", "bubble_rate", "gathers", "reductions"];
let sorted = { by: "makespan", up: true };
let tableRows = [];

function value(row, key) {
  return key === "kind" ? row.kind : row.numbers ? row.numbers[key] : Infinity;
}

function cell(key, x) {
  if (key === "makespan" || key === "own_span") return time(x);
  return key.startsWith("bubble") ? (100 * x).toFixed(2) + " %" : String(x);
}

function showTable(rows, chosen, choose) {
  if (rows) tableRows = rows;
  const by = (a, b) => {
    const [x, y] = [value(a, sorted.by), value(b, sorted.by)];
    return (x < y ? -1 : x > y ? 1 : 0) * (sorted.up ? 1 : -1);
  };
  const head = document.createElement("tr");
  for (const [key, name] of COLUMNS) {
    const th = document.createElement("th");
    th.textContent = name;
    th.tabIndex = 0;
    th.scope = "col";
    if (LESS.includes(key)) th.className = "less";
    if (key === sorted.by) th.setAttribute("aria-sort", sorted.up ? "ascending" : "descending");
    const sort = () => {
      sorted = { by: key, up: key === sorted.by ? !sorted.up : true };
      showTable(null, chosen, choose);
      document.querySelectorAll("#table th")[COLUMNS.findIndex((c) => c[0] === key)].focus();
    };
    th.onclick = sort;
    th.onkeydown = (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); sort(); } };
    head.append(th);
  }
  document.querySelector("#table thead").replaceChildren(head);
  document.querySelector("#table tbody").replaceChildren(...[...tableRows].sort(by).map((row) => {
    const tr = document.createElement("tr");
    if (row.kind === chosen) tr.className = "chosen";
    const cells = row.numbers ? COLUMNS.map(([key]) => cell(key, value(row, key))) : [row.kind];
    cells.forEach((text, i) => {
      const td = tr.insertCell();
      td.textContent = text;
      if (LESS.includes(COLUMNS[i][0])) td.className = "less";
    });
    if (row.error) {
      const why = tr.insertCell();
      why.colSpan = COLUMNS.length - 1 - (innerWidth > 820 ? 0 : LESS.length);
      why.className = "why";
      why.textContent = row.error;
    }
    tr.onclick = () => choose(row.kind);
    return tr;
  }));
  scatter(chosen);
}

// The same picture as that of `zeropp schedule --all`.
function scatter(chosen) {
  const host = document.getElementById("scatter"), good = tableRows.filter((row) => row.numbers);
  const dots = good.map((row) => ({ kind: row.kind, bubble: row.numbers.bubble, peak: row.numbers.peak, chosen: row.kind === chosen }));
  const answer = program.ask({ ask: "scatter", dots, wide: Math.min(860, Math.max(300, host.clientWidth || 860)) });
  host.innerHTML = answer.svg ?? "";
}
