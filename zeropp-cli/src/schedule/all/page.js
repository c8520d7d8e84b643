"use strict";
// Sorts the table by the column that is chosen; kinds without numbers stay at the end.
const body = document.querySelector("tbody");
for (const head of document.querySelectorAll("th")) {
  head.querySelector("button").addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    document.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const by = (row) => row.cells[head.cellIndex].dataset.by;
    const order = (a, b) => head.dataset.by === "kind" ? by(a).localeCompare(by(b)) : by(a) - by(b);
    const rows = [...body.rows].filter((row) => !row.classList.contains("misfit"));
    const misfits = [...body.rows].filter((row) => row.classList.contains("misfit"));
    rows.sort((a, b) => up ? order(a, b) : order(b, a));
    body.replaceChildren(...rows, ...misfits);
  });
}
