// Results over many inputs: aggregated scores, means with their intervals, methods by rank, tables.
import { h, svg, collapsible, scrollable } from "./dom.js";
import { formatAligned, isMissing, formatNumber } from "./format.js";
import { scoreBars } from "./bars.js";

const MAX_BARS = 30;

export const aggregateView = ({ heading, rows }, options = {}) => {
  const vmax = Math.max(...rows.map(([, score]) => Math.abs(score)), 0) || 1;
  const scale = { labels: rows.map(([label]) => label), special: rows.map(() => false), scores: rows.map(([, score]) => score), vmax };
  const formatScore = (index) => `${formatAligned(rows[index][1], vmax)} (${rows[index][2]})`;
  const order = rows.map((_, index) => index).sort((a, b) => Math.abs(rows[b][1]) - Math.abs(rows[a][1]));
  const largest = order.slice(0, MAX_BARS).sort((a, b) => rows[b][1] - rows[a][1]);
  return h("section", { class: "ch-input" }, options.showHeading !== false && h("h2", null, heading),
    h("div", { class: "ch-card ch-global" }, scoreBars(`${rows.length > MAX_BARS ? `The ${MAX_BARS} largest of ${rows.length}` : "Highest first"}; counts in brackets`, scale, largest, formatScore),
      rows.length > MAX_BARS && h("div", { class: "ch-details" }, collapsible(`All ${rows.length}`, () => scoreBars("Highest first", scale, rows.map((_, index) => index), formatScore)))));
};

// A mean with its interval on a common scale.
const whisker = ({ mean, low, high }, axisLow, axisHigh) => {
  const toX = (value) => 4 + (value - axisLow) / (axisHigh - axisLow || 1) * 152;
  return svg("svg", { viewBox: "0 0 160 14", width: 160, height: 14, class: "ch-whisker", "aria-hidden": "true" },
    axisLow < 0 && axisHigh > 0 && svg("line", { x1: toX(0), x2: toX(0), y1: 0, y2: 14, class: "ch-grid-line" }),
    !isMissing(low) && svg("line", { x1: toX(low), x2: toX(high), y1: 7, y2: 7, class: "ch-interval" }), svg("circle", { cx: toX(mean), cy: 7, r: 3.5, class: "ch-mean" }));
};

// rows: name, mean, low, high, count, description
export const intervalTable = ({ caption, rows }) => {
  const values = rows.flatMap(({ mean, low, high }) => [mean, low, high]).filter((value) => !isMissing(value));
  const axisLow = Math.min(0, ...values), axisHigh = Math.max(...values, axisLow + 1e-9);
  return scrollable(caption, h("table", { class: "ch-data-table" }, h("caption", null, caption),
    h("tbody", null, rows.map((row) => h("tr", null, h("th", { scope: "row" }, row.name),
      h("td", null, row.mean === null ? "–" : whisker(row, axisLow, axisHigh)),
      h("td", null, `${formatNumber(row.mean, 3)} `, !isMissing(row.low) && h("small", null, `[${formatNumber(row.low, 3)}, ${formatNumber(row.high, 3)}], n = ${row.count}`)),
      h("td", { class: "ch-note" }, row.description))))));
};

// Methods by rank: means on the scale of their column, with their intervals.
export const rankingTable = ({ title, columns, ranges: axisRanges, rows }) => scrollable(title, h("table", { class: "ch-data-table" },
  h("thead", null, h("tr", null, ["method", ...columns].map((column) => h("th", { scope: "col" }, column)))),
  h("tbody", null, rows.map(({ name, is_control: isControl, cells }) => h("tr", { class: isControl && "ch-control" }, h("th", { scope: "row" }, name),
    cells.map((cell, column) => h("td", null, cell === null ? "–" : [whisker(cell, ...axisRanges[column]), ` ${cell.texts[0]} `,
      cell.texts.length > 1 && h("small", null, `[${cell.texts[1]}, ${cell.texts[2]}] `), cell.count && h("small", null, `(${cell.count}) `), h("b", { title: "rank" }, cell.rank)])))))));

export const dataTable = ({ title, caption, columns, rows }) => scrollable(title || caption || "Figures", h("table", { class: "ch-data-table" }, caption && h("caption", null, caption),
  h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col" }, column)))),
  h("tbody", null, rows.map(([first, ...rest]) => h("tr", null, h("th", { scope: "row" }, first), rest.map((cell) => h("td", null, cell)))))));
