"use strict";
for (const button of document.querySelectorAll(".command button")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    // A page from a file may not be let at the clipboard: then the command is marked, to be copied.
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
}

/** A cell by which rows are sorted: its number, in bytes where it has such a unit, or its text. */
function value(row, column) {
  const text = row.cells[column].textContent, number = parseFloat(text.replace(/,(?=\d{3})/g, ""));
  const unit = /^[\d.]+ (B|KiB|MiB|GiB|TiB)$/.exec(text);
  if (Number.isNaN(number)) return text;
  return unit ? number * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].indexOf(unit[1]) : number;
}

for (const head of document.querySelectorAll("th")) {
  head.tabIndex = 0;
  head.title = "Sort by this column";
  const sort = () => {
    const up = head.getAttribute("aria-sort") !== "ascending", column = head.cellIndex;
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1);
    body.append(...[...body.rows].sort((a, b) => order(value(a, column), value(b, column))));
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", (e) => { if (e.key === "Enter") sort(); });
}
