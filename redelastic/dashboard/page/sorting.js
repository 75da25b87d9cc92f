// Tables that people sort by a click on a column's head.

import { h } from "./dom.js";

// columns: each with name, title, kind (its class), key(item): a number, a string, or undefined if it is not known, and falls: whether
// the greatest comes first; changed() is called when the order has.
export function sorting(columns, changed) {
  let first = columns[0];
  let falls = Boolean(first.falls);
  const heads = columns.map((column) => {
    const button = h("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      falls = first === column ? !falls : Boolean(column.falls);
      first = column;
      mark();
      changed();
    });
    return h("th", { scope: "col", class: `${column.kind ?? ""} c-${column.name}` }, button);
  });

  function mark() {
    heads.forEach((head, i) => {
      if (columns[i] === first) head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
  }

  function compare(a, b) { // what is not known comes last in either direction
    const [x, y] = [first.key(a), first.key(b)];
    if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return falls ? -order : order;
  }

  mark();
  return { heads, compare };
}
