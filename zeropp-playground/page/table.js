// All kinds, sortable, and their bubble over memory.
const COLUMNS = [["kind", "Kind"], ["virtual", "V"], ["makespan", "Makespan"], ["own_span", "Own span"],
  ["bubble", "Bubble"], ["bubble_own_span", "Own-span bubble"], ["bubble_rate", "Printed rate"], ["peak", "Peak"],
  ["gathers", "Gathers"], ["reductions", "Reductions"]];
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
    for (const text of cells) tr.insertCell().textContent = text;
    if (row.error) {
      const why = tr.insertCell();
      why.colSpan = COLUMNS.length - 1;
      why.className = "why";
      why.textContent = row.error;
    }
    tr.onclick = () => choose(row.kind);
    return tr;
  }));
  scatter(chosen);
}

function scatter(chosen) {
  const good = tableRows.filter((row) => row.numbers);
  const svg = document.getElementById("scatter");
  const width = 640, height = 300, left = 56, bottom = 40;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const most = (key) => Math.max(1e-9, ...good.map((row) => row.numbers[key])) * 1.08;
  const [peak, bubble] = [most("peak"), Math.max(0.02, most("bubble"))];
  const x = (n) => left + (n / peak) * (width - left - 90), y = (n) => height - bottom - (n / bubble) * (height - bottom - 16);
  const make = (tag, set, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in set) node.setAttribute(key, set[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const ink = { fill: "currentColor", "font-size": 11 };
  const nodes = [make("path", { d: `M${left} 10V${height - bottom}H${width - 80}`, fill: "none", stroke: "currentColor" }),
    make("text", { ...ink, x: left, y: height - 8 }, `peak activation memory, 0 to ${(peak / 1.08).toFixed(0)}`),
    make("text", { ...ink, x: 4, y: 14 }, `${(100 * bubble).toFixed(0)} %`), make("text", { ...ink, x: 4, y: height - bottom }, "0 %"),
    make("text", { ...ink, x: 4, y: height / 2 }, "bubble")];
  const taken = [];
  for (const row of good) {
    const at = [x(row.numbers.peak), y(row.numbers.bubble)];
    nodes.push(make("circle", { cx: at[0], cy: at[1], r: row.kind === chosen ? 6 : 4, fill: row.kind === chosen ? "#d55e00" : "#3b8bd0" }));
    let down = at[1] + 4;
    while (taken.some(([tx, ty]) => Math.abs(tx - at[0]) < 90 && Math.abs(ty - down) < 11)) down -= 11;
    taken.push([at[0], down]);
    nodes.push(make("text", { ...ink, x: at[0] + 8, y: down }, row.kind));
  }
  svg.replaceChildren(...nodes);
}
