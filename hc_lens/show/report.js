"use strict";
// A click on a heading sorts its table by that column; a second click reverses the order.
for (const table of document.querySelectorAll("table")) {
  const heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach((head, column) => {
    const numeric = head.classList.contains("number");
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[column].dataset.value;
      const rows = Array.from(table.tBodies[0].rows);
      rows.sort((one, two) => {
        const [a, b] = [key(one), key(two)];
        if (numeric && (a === "" || b === "")) return (a === "") - (b === "");
        const order = numeric ? Number(a) - Number(b) : a.localeCompare(b);
        return down ? -order : order;
      });
      rows.forEach((row) => table.tBodies[0].appendChild(row));
    });
  });
}
