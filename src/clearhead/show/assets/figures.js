// Figures over many inputs: global bars, means with their intervals, curves with bands, maps of layers and heads.
import { h, svg, folded, scrolled, unpacked } from "./dom.js";
import { aligned, number } from "./format.js";
import { bars } from "./bars.js";
import { matrix } from "./matrix.js";

const MOST = 30;

export const aggregate = ({ heading, rows }, options = {}) => {
  const full = Math.max(...rows.map(([, score]) => Math.abs(score)), 0) || 1;
  const scale = { labels: rows.map(([what]) => what), special: rows.map(() => false), scores: rows.map(([, score]) => score), full };
  const said = (place) => `${aligned(rows[place][1], full)} (${rows[place][2]})`;
  const order = rows.map((_, place) => place).sort((a, b) => Math.abs(rows[b][1]) - Math.abs(rows[a][1]));
  const top = order.slice(0, MOST).sort((a, b) => rows[b][1] - rows[a][1]);
  return h("section", { class: "ch-input" }, options.head !== false && h("h2", null, heading),
    h("div", { class: "ch-card ch-global" }, bars(`${rows.length > MOST ? `The ${MOST} largest of ${rows.length}` : "The highest first"}; in brackets, how often`, scale, top, said),
      rows.length > MOST && h("div", { class: "ch-more" }, folded(`All ${rows.length}`, () => bars("The highest first", scale, rows.map((_, place) => place), said)))));
};

// A mean with its interval on a common scale.
const whisker = ({ mean, low, high }, from, to) => {
  const x = (value) => 4 + (value - from) / (to - from || 1) * 152;
  return svg("svg", { viewBox: "0 0 160 14", width: 160, height: 14, class: "ch-whisker", "aria-hidden": "true" },
    from < 0 && to > 0 && svg("line", { x1: x(0), x2: x(0), y1: 0, y2: 14, class: "ch-rule" }),
    svg("line", { x1: x(low), x2: x(high), y1: 7, y2: 7, class: "ch-span" }), svg("circle", { cx: x(mean), cy: 7, r: 3.5, class: "ch-mean" }));
};

// rows: name, mean, low, high, count, meaning
export const intervals = ({ caption, rows }) => {
  const known = rows.flatMap(({ low, high }) => [low, high]).filter((value) => value !== null);
  const from = Math.min(0, ...known), to = Math.max(...known, from + 1e-9);
  return scrolled(caption, h("table", { class: "ch-figures" }, h("caption", null, caption),
    h("tbody", null, rows.map((row) => h("tr", null, h("th", { scope: "row" }, row.name),
      h("td", null, row.mean === null ? "–" : whisker(row, from, to)),
      h("td", null, `${number(row.mean, 3)} `, h("small", null, `[${number(row.low, 3)}, ${number(row.high, 3)}]`)),
      h("td", { class: "ch-note" }, row.meaning))))));
};

// Methods by rank: means on the scale of their column, with their intervals.
export const ranking = ({ title, columns, ends, rows }) => scrolled(title, h("table", { class: "ch-figures" },
  h("thead", null, h("tr", null, ["method", ...columns].map((head) => h("th", { scope: "col" }, head)))),
  h("tbody", null, rows.map(({ name, control, cells }) => h("tr", { class: control && "ch-control" }, h("th", { scope: "row" }, name),
    cells.map((cell, column) => h("td", null, cell === null ? "–" : [whisker(cell, ...ends[column]), ` ${cell.said[0]} `,
      h("small", null, `[${cell.said[1]}, ${cell.said[2]}] `), h("b", { title: "rank" }, cell.rank)])))))));

export const table = ({ title, caption, heads, rows }) => scrolled(title || caption || "Figures", h("table", { class: "ch-figures" }, caption && h("caption", null, caption),
  h("thead", null, h("tr", null, heads.map((head) => h("th", { scope: "col" }, head)))),
  h("tbody", null, rows.map(([first, ...rest]) => h("tr", null, h("th", { scope: "row" }, first), rest.map((cell) => h("td", null, cell)))))));

const HUES = [45, 250, 145, 330, 95, 200, 290, 15], DASHES = ["", "6 3", "2 3", "8 3 2 3"];

// lines: name, x, y and, where there are intervals, low and high; grey: a control
export const curves = ({ title, across, lines }) => {
  const WIDE = 460, HIGH = 250, LEFT = 44, FOOT = 38, known = lines.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]).filter((y) => y !== null);
  const [low, high] = [Math.min(0, ...known), Math.max(1e-9, ...known)], xs = lines.flatMap((line) => line.x), [first, last] = [Math.min(...xs), Math.max(...xs)];
  const x = (value) => LEFT + (value - first) / (last - first || 1) * (WIDE - LEFT - 12), y = (value) => HIGH - FOOT - (value - low) / (high - low || 1) * (HIGH - FOOT - 12);
  const parts = [0, 1, 2, 3, 4].map((part) => part / 4);
  const look = (line, place) => ({ style: { stroke: line.grey ? "var(--faint)" : `oklch(var(--line-light) 0.15 ${HUES[place % HUES.length]})`, fill: line.grey ? "var(--faint)" : `oklch(var(--line-light) 0.15 ${HUES[place % HUES.length]})` }, "stroke-dasharray": DASHES[line.grey ? 1 : Math.floor(place / HUES.length) % 4] || null });
  const path = (points) => points.map(([a, b], place) => `${place ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": title },
    parts.map((part) => { const at = low + part * (high - low); return [svg("line", { x1: LEFT, x2: WIDE - 12, y1: y(at), y2: y(at), class: "ch-rule" }), svg("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, number(at, 2))]; }),
    parts.map((part) => svg("text", { x: x(first + part * (last - first)), y: HIGH - FOOT + 16, "text-anchor": "middle" }, number(first + part * (last - first), 2))),
    across && svg("text", { x: (WIDE + LEFT) / 2, y: HIGH - 4, "text-anchor": "middle" }, across),
    lines.map((line, place) => line.low && svg("path", { class: "ch-band", ...look(line, place), d: `${path(line.x.map((at, i) => [at, line.low[i]]))}${path([...line.x.keys()].reverse().map((i) => [line.x[i], line.high[i]])).replace("M", "L")}Z` })),
    lines.map((line, place) => svg("path", { class: "ch-line", ...look(line, place), d: path(line.x.map((at, i) => [at, line.y[i]])) }, svg("title", null, line.name))));
  const sample = (line, place) => h("span", null, svg("svg", { viewBox: "0 0 22 10", width: 22, height: 10, "aria-hidden": "true" }, svg("line", { class: "ch-line", x1: 0, x2: 22, y1: 5, y2: 5, ...look(line, place) })), line.name);
  const heads = [across ?? "x", ...lines.map((line) => line.name)], rows = lines[0].x.map((at, i) => [number(at, 3), ...lines.map((line) => number(line.y[i], 3))]);
  return h("figure", { class: "ch-curves" }, h("figcaption", { class: "ch-label" }, title), picture, h("div", { class: "ch-names-of" }, lines.map(sample)),
    h("div", { class: "ch-more" }, folded("These figures as a table", () => table({ caption: title, heads, rows }))));
};

export const probe = (document_, options = {}) => h("section", { class: "ch-input" },
  options.head !== false && h("h2", null, document_.heading),
  h("p", { class: "ch-note" }, [document_.model, `${document_.inputs} inputs`, ...document_.settings.map((pair) => pair.join(" "))].join(" · ")),
  h("div", { class: "ch-card" }, intervals({ caption: "Means over inputs with 95 % intervals", rows: document_.figures }),
    Object.entries(document_.maps).map(([title, packed]) => h("div", null, h("p", { class: "ch-label" }, `${title}; full colour is ${number(packed.full, 3)}`),
      matrix({ rows: names("layer", packed.shape[0]), columns: names("head", packed.shape[1]), values: unpacked(packed), full: packed.full, label: title, largest: 26 }))),
    h("p", { class: "ch-note" }, document_.says)));

const names = (what, count) => Array.from({ length: count }, (_, place) => `${what} ${place}`);
