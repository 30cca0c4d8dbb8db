// Plots with axes: lines, bars, boxes and points, with their intervals. Every one is also a table of its figures.
import { h, svg, folded, unpacked } from "./dom.js";
import { aligned, isMissing, number, short } from "./format.js";
import { INKS, shade, themed } from "./colour.js";
import { matrix } from "./matrix.js";
import { smallMaps } from "./picture.js";
import { intervals, table } from "./figures.js";

const WIDE = 460, SMALL = 260, HIGH = 250, LEFT = 50, RIGHT = 12, TOP = 14, FOOT = 40;
const BANDS = 8; // of more lines, no bands are drawn: they would hide one another
const DASHES = [null, "7 3", "2 3", "8 3 2 3"];

const ink = (place, grey) => (grey ? "var(--faint)" : themed(shade(place, 0.61), shade(place, 0.76)));
const painted = (place, grey) => ({ style: { stroke: ink(place, grey), fill: ink(place, grey) } });

// Round numbers from low to high.
const ticks = (low, high, most = 5) => {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 2.5, 5, 10].map((part) => part * power).find((part) => part >= rough * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, place) => (first + place) * step);
};

// An axis of numbers: from zero or below to the largest, or the range that was given; or of powers of two.
const numbers = (values, { range, log, whole, tight }) => {
  const known = values.filter((value) => !isMissing(value)), given = range ?? [];
  if (log) {
    const [low, high] = given.map(Math.log2), at = (value) => Math.max(low, Math.min(high, Math.log2(value)));
    return { low, high, at, marks: ticks(low, high).filter(Number.isInteger).map((power) => [power, power < 0 ? `1/${2 ** -power}` : String(2 ** power)]) };
  }
  const low = given[0] ?? (tight ? Math.min(...known) : Math.min(0, ...known)), top = given[1] ?? Math.max(...known, tight ? -Infinity : 0), high = top > low ? top : low + 1;
  const places = ticks(low, high).filter((value) => !whole || Number.isInteger(value));
  return { low, high, at: (value) => value, marks: places.map((value) => [value, number(value, whole ? 4 : 2)]) };
};

// An axis of names; those that have no room stand askew, and of very many only some are written.
const named = (names, most = 40) => {
  const every = Math.ceil(names.length / most), marks = names.map((name, place) => [place, short(name, 18)]).filter(([place]) => place % every === 0);
  return { low: -0.5, high: names.length - 0.5, at: (place) => place, marks };
};

const longest = (marks) => Math.max(0, ...marks.map(([, word]) => word.length));

// Axes with their words, and inside them what `inner` draws with the two scales.
const framed = ({ title, across, up, small, level }, xs, ys, said, inner) => {
  const wide = small ? SMALL : WIDE, left = LEFT - 18 + 5.6 * longest(ys.marks), room = (wide - left - RIGHT) / xs.marks.length;
  const askew = longest(xs.marks) * 5.8 > room, lean = askew ? Math.min(110, longest(xs.marks) * 4.4) : 0, foot = FOOT + lean - (across ? 0 : 14), high = HIGH + lean - (small ? 70 : 0);
  const x = (value) => left + (xs.at(value) - xs.low) / (xs.high - xs.low) * (wide - left - RIGHT);
  const y = (value) => high - foot - (ys.at(value) - ys.low) / (ys.high - ys.low) * (high - foot - TOP);
  const on = (tick) => left + (tick - xs.low) / (xs.high - xs.low) * (wide - left - RIGHT), over = (tick) => high - foot - (tick - ys.low) / (ys.high - ys.low) * (high - foot - TOP);
  const below = high - foot + 16, tilt = (place) => (askew ? { transform: `rotate(-38 ${place} ${below})`, "text-anchor": "end" } : { "text-anchor": "middle" });
  return svg("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${title || up}: ${said}` },
    ys.marks.map(([at, word]) => [svg("line", { x1: left, x2: wide - RIGHT, y1: over(at), y2: over(at), class: "ch-rule" }), svg("text", { x: left - 6, y: over(at) + 4, "text-anchor": "end" }, word)]),
    xs.marks.map(([at, word]) => svg("text", { x: on(at), y: below, ...tilt(on(at).toFixed(1)) }, word)),
    across && svg("text", { x: (wide + left) / 2, y: high - 4, "text-anchor": "middle" }, across),
    up && svg("text", { x: 0, y: 0, transform: `translate(10 ${(high - foot + TOP) / 2}) rotate(-90)`, "text-anchor": "middle" }, short(up, Math.floor((high - foot) / 5.6))),
    inner(x, y),
    level && svg("line", { x1: left, x2: wide - RIGHT, y1: y(level.at), y2: y(level.at), class: "ch-level" }, svg("title", null, level.name)));
};

const sampled = (what, name) => h("span", null, svg("svg", { viewBox: "0 0 22 10", width: 22, height: 10, "aria-hidden": "true" }, what), name);
const leveled = (level) => level && sampled(svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, class: "ch-level" }), level.name);

const figured = ({ title, caption = title, small }, picture, legend, heads, rows, note) => h("figure", { class: `ch-curves${small ? " ch-smaller" : ""}` },
  caption && h("figcaption", { class: "ch-label" }, caption), picture, legend.some(Boolean) && h("div", { class: "ch-names-of" }, legend),
  note && h("p", { class: "ch-note" }, note),
  h("div", { class: "ch-more" }, folded("These figures as a table", () => table({ caption: title, heads, rows }))));

// A value with its interval, to the same places as all others of its axis.
const spanned = ({ low: least, high: most }, value, low, high) => {
  const said = (one) => (isMissing(one) ? number(one) : aligned(one, Math.max(Math.abs(least), Math.abs(most))));
  return isMissing(low) || isMissing(value) ? said(value) : `${said(value)} [${said(low)}, ${said(high)}]`;
};

// Which hue each series has: controls are grey and take none.
const hues = (series) => series.map((one, place) => series.slice(0, place).filter((other) => Boolean(other.grey) === Boolean(one.grey)).length);

const SHAPES = [
  (x, y) => svg("circle", { cx: x, cy: y, r: 2.8 }), (x, y) => svg("rect", { x: x - 2.6, y: y - 2.6, width: 5.2, height: 5.2 }),
  (x, y) => svg("path", { d: `M${x - 3.4},${y + 2.8}h6.8L${x},${y - 3.4}Z` }), (x, y) => svg("path", { d: `M${x},${y - 4}l4,4l-4,4l-4,-4Z` })];
const shape = (place, x, y, said, grey) => {
  const made = SHAPES[place % SHAPES.length](x, y);
  made.style.setProperty("fill", ink(place, grey));
  if (said) made.append(svg("title", null, said));
  return made;
};

// lines: name, x, y and, where there are intervals, low and high; grey: a control; level: a line to measure by
export const curves = (given) => {
  const { across, lines, level, dots = lines.every((line) => line.x.length <= 26) } = given;
  const xs = numbers(lines.flatMap((line) => line.x), { whole: given.whole, tight: true });
  const ys = numbers([...lines.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]), level?.at ?? 0], { range: given.range });
  const own = hues(lines), look = (line, place) => ({ ...painted(own[place], line.grey), "stroke-dasharray": line.grey ? DASHES[1 + own[place] % (DASHES.length - 1)] : DASHES[Math.floor(own[place] / INKS.length) % DASHES.length] });
  const known = (line) => [...line.x.keys()].filter((i) => !isMissing(line.y[i]));
  const said = lines.map((line) => { const seen = known(line); return seen.length ? `${line.name} from ${number(line.y[seen[0]], 3)} to ${number(line.y[seen.at(-1)], 3)}` : line.name; }).join("; ");
  const picture = framed(given, xs, ys, said, (x, y) => {
    const path = (points) => points.map(([a, b], place) => `${place ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
    const band = (line) => known(line).filter((i) => !isMissing(line.low[i]));
    return [
      lines.length <= BANDS && lines.map((line, place) => line.low && svg("path", { class: "ch-band", ...look(line, place), d: `${path(band(line).map((i) => [line.x[i], line.low[i]]))}${path(band(line).reverse().map((i) => [line.x[i], line.high[i]])).replace("M", "L")}Z` })),
      lines.map((line, place) => [svg("path", { class: "ch-line", ...look(line, place), d: path(known(line).map((i) => [line.x[i], line.y[i]])) }, svg("title", null, line.name)),
        dots && known(line).map((i) => shape(own[place], x(line.x[i]), y(line.y[i]), `${line.names?.[i] ?? `${line.name}, ${across ?? "x"} ${number(line.x[i], 3)}`}: ${spanned(ys, line.y[i], line.low?.[i], line.high?.[i])}`, line.grey))])];
  });
  const sample = (line, place) => sampled([svg("line", { class: "ch-line", x1: 0, x2: 22, y1: 5, y2: 5, ...look(line, place) }), dots && shape(own[place], 11, 5, null, line.grey)], line.name);
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const cell = (line, at) => { const i = line.x.indexOf(at); return i < 0 ? "–" : spanned(ys, line.y[i], line.low?.[i], line.high?.[i]); };
  const unbanded = lines.length > BANDS && lines.some((line) => line.low) && `Intervals are not drawn for more than ${BANDS} lines: they are ${dots ? "in the tooltips and " : ""}in the table.`;
  return figured(given, picture, [...(lines.length > 1 || level ? lines.map(sample) : []), leveled(level)], [across ?? "x", ...lines.map((line) => line.name)], places.map((at) => [number(at, 3), ...lines.map((line) => cell(line, at))]), unbanded);
};

// series: name, grey, cells – one for each group: value, low, high, count, mark (a sign over it), said, level (of its own); null: nothing
export const bars = (given) => {
  const { across, groups, series, stacked, level } = given, every = series.flatMap((one) => one.cells).filter(Boolean);
  const sums = groups.map((_, group) => series.reduce((sum, one) => sum + (one.cells[group]?.value ?? 0), 0));
  const ys = numbers([...(stacked ? sums : every.flatMap((cell) => [cell.value, cell.low, cell.high, cell.level])), level?.at ?? 0], { range: given.range, whole: given.whole });
  const words = (cell) => (cell === null ? "–" : cell.said ?? spanned(ys, cell.value, cell.low, cell.high) + (cell.count ? `, n = ${cell.count}` : "") + (cell.mark ? ` ${cell.mark}` : ""));
  const most = series.map((one) => { const best = one.cells.reduce((found, cell, group) => (cell && !(cell.value <= (one.cells[found]?.value ?? -Infinity)) ? group : found), 0); return `${one.name || "largest"}: ${groups[best]} ${words(one.cells[best])}`; });
  const width = stacked ? 0.9 : 0.84 / series.length;
  const picture = framed(given, named(groups, given.sparse ? 10 : 40), ys, `largest of ${most.join("; ")}`, (x, y) => groups.map((group, at) => {
    let floor = 0;
    return series.map((one, place) => {
      const cell = one.cells[at];
      if (!cell) return null;
      const middle = at + (stacked ? 0 : (place - (series.length - 1) / 2) * width), from = x(middle - width * 0.46), to = x(middle + width * 0.46), base = stacked ? floor : 0, end = base + (cell.value ?? 0);
      floor = stacked ? end : 0;
      const top = Math.min(y(base), y(end)), over = isMissing(cell.high) ? top : Math.min(top, y(cell.high));
      return svg("g", null, svg("title", null, `${[group, one.name].filter(Boolean).join(", ")}: ${words(cell)}`),
        svg("rect", { class: "ch-column", x: from, width: Math.max(0.5, to - from), y: top, height: Math.abs(y(base) - y(end)), ...painted(place, one.grey) }),
        !isMissing(cell.low) && svg("line", { class: "ch-mark", x1: x(middle), x2: x(middle), y1: y(cell.low), y2: y(cell.high) }),
        !isMissing(cell.level) && svg("line", { class: "ch-level", x1: from - 2, x2: to + 2, y1: y(cell.level), y2: y(cell.level) }),
        cell.mark && svg("text", { class: "ch-strong", x: x(middle), y: over - 3, "text-anchor": "middle" }, cell.mark));
    });
  }));
  const key = (one, place) => sampled(svg("rect", { class: "ch-column", x: 4, y: 0, width: 14, height: 10, ...painted(place, one.grey) }), one.name);
  return figured(given, picture, [...(series.length > 1 ? series.map(key) : []), leveled(level)], [across ?? "", ...series.map((one) => one.name || given.up)], groups.map((group, at) => [group, ...series.map((one) => words(one.cells[at]))]));
};

// series: name, cells – one for each group: low, first, median, third, high, count; null: nothing
export const boxes = (given) => {
  const { groups, series, level } = given, every = series.flatMap((one) => one.cells).filter(Boolean), width = 0.8 / series.length;
  const ys = numbers([...every.flatMap((cell) => [cell.low, cell.high]), level?.at ?? 0], { range: given.range });
  const words = (cell) => (cell === null ? "–" : `${number(cell.median, 3)} [${number(cell.first, 3)}, ${number(cell.third, 3)}], ${cell.count}`);
  const picture = framed(given, named(groups), ys, `medians of ${groups.length} groups; the table below has them`, (x, y) => groups.map((group, at) => series.map((one, place) => {
    const cell = one.cells[at];
    if (!cell) return null;
    const middle = at + (place - (series.length - 1) / 2) * width, from = x(middle - width * 0.42), to = x(middle + width * 0.42), stem = (a, b) => svg("line", { class: "ch-mark", x1: x(middle), x2: x(middle), y1: y(a), y2: y(b) });
    return svg("g", null, svg("title", null, `${group}, ${one.name}: median ${words(cell)} inputs`), stem(cell.low, cell.first), stem(cell.third, cell.high),
      svg("rect", { class: "ch-column", x: from, width: to - from, y: y(cell.third), height: Math.max(0.5, y(cell.first) - y(cell.third)), ...painted(place) }),
      svg("line", { class: "ch-mark ch-median", x1: from, x2: to, y1: y(cell.median), y2: y(cell.median) }));
  })));
  const key = (one, place) => sampled(svg("rect", { class: "ch-column", x: 4, y: 0, width: 14, height: 10, ...painted(place) }), one.name);
  return figured(given, picture, [...series.map(key), leveled(level)], ["", ...series.map((one) => `${one.name}: median [quartiles], inputs`)], groups.map((group, at) => [group, ...series.map((one) => words(one.cells[at]))]));
};

// series: name, x, y, names (of single points); means: name, x, y – joined by a line
export const points = (given) => {
  const { across, up, series, means, level } = given;
  const xs = numbers(series.flatMap((one) => one.x), { range: given.across_range, whole: given.whole, tight: given.whole });
  const ys = numbers([...series.flatMap((one) => one.y), level?.at ?? 0], { range: given.range, log: given.log });
  const edge = (xs.high - xs.low) * 0.04; // no point is cut by the frame
  xs.low -= edge;
  xs.high += edge;
  const said = means ? means.x.map((at, i) => `${number(at, 2)}: ${number(means.y[i], 3)}`).join("; ") : `${series.reduce((sum, one) => sum + one.x.length, 0)} points`;
  const picture = framed(given, xs, ys, `${means ? `${means.name} ` : ""}${said}`, (x, y) => [
    series.map((one, place) => svg("g", { class: "ch-dots" }, one.x.map((at, i) => (isMissing(one.y[i]) ? null : shape(place, x(at), y(one.y[i]), `${one.names?.[i] ?? one.name}: ${number(at, 3)}, ${number(one.y[i], 3)}`, one.grey))))),
    means && svg("path", { class: "ch-line ch-means", d: means.x.map((at, i) => `${i ? "L" : "M"}${x(at).toFixed(1)},${y(means.y[i]).toFixed(1)}`).join("") }, svg("title", null, means.name))]);
  const key = (one, place) => sampled(shape(place, 11, 5, null, one.grey), one.name);
  const legend = [...(series.length > 1 || means ? series.map(key) : []), means && sampled(svg("line", { class: "ch-line ch-means", x1: 0, x2: 22, y1: 5, y2: 5 }), means.name), leveled(level)];
  const rows = [...(means ? means.x.map((at, i) => [means.name, number(at, 3), number(means.y[i], 3)]) : []), ...series.flatMap((one) => one.x.map((at, i) => [one.names?.[i] ?? one.name, number(at, 3), number(one.y[i], 3)]))];
  return figured(given, picture, legend, ["", across ?? "x", up ?? "y"], rows);
};

// rows × columns of scores, or of weights, which have no sign; marks: cells with a dot; words: what a cell says
export const map = (given) => {
  const { title, rows, columns, words, marked, across, up, small } = given, values = unpacked(given.values);
  return h("figure", { class: "ch-curves ch-wide-map" }, title && h("figcaption", { class: "ch-label" }, title),
    matrix({ rows, columns, values, full: given.values.full, weights: given.weights, marks: given.marks, words, label: title || `${up} by ${across}`, corner: up, written: given.written, largest: given.written ? 46 : small ? 18 : 26, room: small ? 300 : 980,
      told: (row, column) => [[`${rows[row]}, ${columns[column]}`, words?.[row][column] ?? number(values[row * columns.length + column], 3)]] }),
    h("p", { class: "ch-note" }, [`rows: ${up}; columns: ${across}; full colour is ${given.full_said ?? number(given.values.full, 3)}`, marked].filter(Boolean).join("; ")));
};

// Maps over pictures, one beside the other; every one says where it is strongest.
export const overlays = ({ title, maps }) => h("figure", { class: "ch-larger" }, title && h("figcaption", { class: "ch-label" }, title),
  h("div", { class: "ch-small" }, maps.map((one) => {
    const values = [...unpacked(one.values)], [, columns] = one.grid, best = values.reduce((found, value, at) => (Math.abs(value) > Math.abs(values[found]) ? at : found), 0);
    const said = `${one.name}; strongest: row ${Math.floor(best / columns)}, column ${best % columns}: ${number(values[best], 3)}`;
    return smallMaps({ grid: one.grid, size: one.size }, [values], one.values.full, one.picture, [], [said]).firstChild;
  })));

export const PLOTS = { curves, bars, boxes, points, map, overlays };

// Means with their intervals, layer × head maps, and what a probe has to be drawn.
export const probe = (document_, options = {}) => h("section", { class: "ch-input" },
  options.head !== false && h("h2", null, document_.heading),
  h("p", { class: "ch-note" }, [document_.model, `${document_.inputs} inputs`, ...document_.settings.map((pair) => pair.join(" "))].join(" · ")),
  h("div", { class: "ch-card" }, intervals({ caption: "Means over inputs with 95 % intervals", rows: document_.figures }),
    Object.entries(document_.maps).map(([title, packed]) => h("div", null, h("p", { class: "ch-label" }, `${title}; full colour is ${number(packed.full, 3)}`),
      matrix({ rows: names("layer", packed.shape[0]), columns: names("head", packed.shape[1]), values: unpacked(packed), full: packed.full, label: title, largest: 26 }))),
    document_.plots.length > 0 && h("div", { class: "ch-plots" }, document_.plots.map((plot) => PLOTS[plot.view](plot))),
    h("p", { class: "ch-note" }, document_.says)));

const names = (what, count) => Array.from({ length: count }, (_, place) => `${what} ${place}`);
