"use strict";
const valueOf = (cell) => cell.dataset.v ?? cell.textContent;

const csvOf = (table) => {
  const quoted = (text) => (/[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text);
  const head = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map(valueOf));
  return [head, ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
};

const copied = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // no permission, or a browser that gives none to files
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
};

const sortBy = (header) => {
  const table = header.closest("table");
  const column = header.cellIndex;
  const up = header.getAttribute("aria-sort") !== "ascending";
  const compare = (a, b) => {
    const [x, y] = [a, b].map((row) => valueOf(row.cells[column]));
    if (x === "" || y === "") return (x === "") - (y === "");  // what is missing stays at the end
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return up ? order : -order;
  };
  const body = table.tBodies[0];
  body.append(...[...body.rows].sort(compare));
  for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
};

for (const button of document.querySelectorAll("button.sort"))
  button.addEventListener("click", () => sortBy(button.closest("th")));

for (const button of document.querySelectorAll("button.copy"))
  button.addEventListener("click", async () => {
    const done = await copied(csvOf(document.getElementById(button.dataset.table)));
    button.textContent = done ? "Copied" : "Could not copy";
    setTimeout(() => { button.textContent = "Copy as CSV"; }, 1500);
  });

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const part of opened) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of opened) part.open = false;
});
