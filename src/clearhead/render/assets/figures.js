// Figures over many inputs: global bars, means with their intervals, methods by rank, tables.
import { h, svg, folded, scrolled } from "./dom.js";
import { aligned, isMissing, number } from "./format.js";
import { bars } from "./bars.js";

const MOST = 30;

export const aggregate = ({ heading, rows }, options = {}) => {
  const full = Math.max(...rows.map(([, score]) => Math.abs(score)), 0) || 1;
  const scale = { labels: rows.map(([what]) => what), special: rows.map(() => false), scores: rows.map(([, score]) => score), full };
  const said = (place) => `${aligned(rows[place][1], full)} (${rows[place][2]})`;
  const order = rows.map((_, place) => place).sort((a, b) => Math.abs(rows[b][1]) - Math.abs(rows[a][1]));
  const top = order.slice(0, MOST).sort((a, b) => rows[b][1] - rows[a][1]);
  return h("section", { class: "ch-input" }, options.head !== false && h("h2", null, heading),
    h("div", { class: "ch-card ch-global" }, bars(`${rows.length > MOST ? `The ${MOST} largest of ${rows.length}` : "Highest first"}; counts in brackets`, scale, top, said),
      rows.length > MOST && h("div", { class: "ch-more" }, folded(`All ${rows.length}`, () => bars("Highest first", scale, rows.map((_, place) => place), said)))));
};

// A mean with its interval on a common scale.
const whisker = ({ mean, low, high }, from, to) => {
  const x = (value) => 4 + (value - from) / (to - from || 1) * 152;
  return svg("svg", { viewBox: "0 0 160 14", width: 160, height: 14, class: "ch-whisker", "aria-hidden": "true" },
    from < 0 && to > 0 && svg("line", { x1: x(0), x2: x(0), y1: 0, y2: 14, class: "ch-rule" }),
    !isMissing(low) && svg("line", { x1: x(low), x2: x(high), y1: 7, y2: 7, class: "ch-span" }), svg("circle", { cx: x(mean), cy: 7, r: 3.5, class: "ch-mean" }));
};

// rows: name, mean, low, high, count, meaning
export const intervals = ({ caption, rows }) => {
  const known = rows.flatMap(({ mean, low, high }) => [mean, low, high]).filter((value) => !isMissing(value));
  const from = Math.min(0, ...known), to = Math.max(...known, from + 1e-9);
  return scrolled(caption, h("table", { class: "ch-figures" }, h("caption", null, caption),
    h("tbody", null, rows.map((row) => h("tr", null, h("th", { scope: "row" }, row.name),
      h("td", null, row.mean === null ? "–" : whisker(row, from, to)),
      h("td", null, `${number(row.mean, 3)} `, !isMissing(row.low) && h("small", null, `[${number(row.low, 3)}, ${number(row.high, 3)}], n = ${row.count}`)),
      h("td", { class: "ch-note" }, row.meaning))))));
};

// Methods by rank: means on the scale of their column, with their intervals.
export const ranking = ({ title, columns, ends, rows }) => scrolled(title, h("table", { class: "ch-figures" },
  h("thead", null, h("tr", null, ["method", ...columns].map((head) => h("th", { scope: "col" }, head)))),
  h("tbody", null, rows.map(({ name, control, cells }) => h("tr", { class: control && "ch-control" }, h("th", { scope: "row" }, name),
    cells.map((cell, column) => h("td", null, cell === null ? "–" : [whisker(cell, ...ends[column]), ` ${cell.said[0]} `,
      cell.said.length > 1 && h("small", null, `[${cell.said[1]}, ${cell.said[2]}] `), cell.count && h("small", null, `(${cell.count}) `), h("b", { title: "rank" }, cell.rank)])))))));

export const table = ({ title, caption, heads, rows }) => scrolled(title || caption || "Figures", h("table", { class: "ch-figures" }, caption && h("caption", null, caption),
  h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
  h("tbody", null, rows.map(([first, ...rest]) => h("tr", null, h("th", { scope: "row" }, first), rest.map((cell) => h("td", null, cell)))))));
