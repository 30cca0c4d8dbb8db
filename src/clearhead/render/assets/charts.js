// Charts with axes: lines, bars, boxes, points and heat maps, with their intervals. Each has a table of its values below.
import { h, svg, collapsible, decodeArray } from "./dom.js";
import { formatAligned, isMissing, formatNumber, truncate } from "./format.js";
import { SERIES_HUES, getSeriesColour, makeThemeColour } from "./colour.js";
import { matrix } from "./matrix.js";
import { smallHeatMaps } from "./image.js";
import { intervalTable, dataTable } from "./tables.js";

const WIDTH = 460, SMALL_WIDTH = 260, HEIGHT = 250, LEFT_MARGIN = 50, RIGHT_MARGIN = 12, TOP_MARGIN = 14, BOTTOM_MARGIN = 40;
const MAX_BANDS = 8; // bands of more lines would hide each other, and are not drawn
const DASHES = [null, "7 3", "2 3", "8 3 2 3"];

const getColour = (index, isGrey) => (isGrey ? "var(--faint)" : makeThemeColour(getSeriesColour(index, 0.61), getSeriesColour(index, 0.76)));
const makeColourStyle = (index, isGrey) => ({ style: { stroke: getColour(index, isGrey), fill: getColour(index, isGrey) } });

// Round tick values from low to high.
const computeTicks = (low, high, maxTicks = 5) => {
  const roughStep = (high - low) / maxTicks, power = 10 ** Math.floor(Math.log10(roughStep)), step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((factor) => factor >= roughStep * 0.999);
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, index) => (first + index) * step);
};

// An axis of numbers: from zero (or the minimum) to the maximum, or the given range; or a log₂ axis.
const makeNumberAxis = (values, { range, isLog, isInteger, isTight }) => {
  const finite = values.filter((value) => !isMissing(value)), bounds = range ?? [];
  if (isLog) {
    const [low, high] = bounds.map(Math.log2), transform = (value) => Math.max(low, Math.min(high, Math.log2(value)));
    return { low, high, toAxis: transform, marks: computeTicks(low, high).filter(Number.isInteger).map((power) => [power, power < 0 ? `1/${2 ** -power}` : String(2 ** power)]) };
  }
  const low = bounds[0] ?? (isTight ? Math.min(...finite) : Math.min(0, ...finite)), top = bounds[1] ?? Math.max(...finite, isTight ? -Infinity : 0), high = top > low ? top : low + 1;
  const tickValues = computeTicks(low, high).filter((value) => !isInteger || Number.isInteger(value));
  return { low, high, toAxis: (value) => value, marks: tickValues.map((value) => [value, formatNumber(value, isInteger ? 4 : 2)]) };
};

// An axis of names; labels without enough room are tilted, and of very many only some are drawn.
const makeNameAxis = (names, maxLabels = 40) => {
  const interval = Math.ceil(names.length / maxLabels), marks = names.map((name, index) => [index, truncate(name, 18)]).filter(([index]) => index % interval === 0);
  return { low: -0.5, high: names.length - 0.5, toAxis: (index) => index, marks };
};

const computeLabelLength = (marks) => Math.max(0, ...marks.map(([, label]) => label.length));

// Axes with their labels, and the content that `drawContent` draws with the two scales.
const drawAxes = ({ title, x_label: xLabel, y_label: yLabel, small: isSmall, reference_line: referenceLine }, xAxis, yAxis, description, drawContent) => {
  const width = isSmall ? SMALL_WIDTH : WIDTH, left = LEFT_MARGIN - 18 + 5.6 * computeLabelLength(yAxis.marks), labelWidth = (width - left - RIGHT_MARGIN) / xAxis.marks.length;
  const isTilted = computeLabelLength(xAxis.marks) * 5.8 > labelWidth, tiltHeight = isTilted ? Math.min(110, computeLabelLength(xAxis.marks) * 4.4) : 0, bottom = BOTTOM_MARGIN + tiltHeight - (xLabel ? 0 : 14), height = HEIGHT + tiltHeight - (isSmall ? 70 : 0);
  const x = (value) => left + (xAxis.toAxis(value) - xAxis.low) / (xAxis.high - xAxis.low) * (width - left - RIGHT_MARGIN);
  const y = (value) => height - bottom - (yAxis.toAxis(value) - yAxis.low) / (yAxis.high - yAxis.low) * (height - bottom - TOP_MARGIN);
  const tickX = (tick) => left + (tick - xAxis.low) / (xAxis.high - xAxis.low) * (width - left - RIGHT_MARGIN), tickY = (tick) => height - bottom - (tick - yAxis.low) / (yAxis.high - yAxis.low) * (height - bottom - TOP_MARGIN);
  const labelY = height - bottom + 16, makeLabelStyle = (index) => (isTilted ? { transform: `rotate(-38 ${index} ${labelY})`, "text-anchor": "end" } : { "text-anchor": "middle" });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title || yLabel}: ${description}` },
    yAxis.marks.map(([position, label]) => [svg("line", { x1: left, x2: width - RIGHT_MARGIN, y1: tickY(position), y2: tickY(position), class: "ch-grid-line" }), svg("text", { x: left - 6, y: tickY(position) + 4, "text-anchor": "end" }, label)]),
    xAxis.marks.map(([position, label]) => svg("text", { x: tickX(position), y: labelY, ...makeLabelStyle(tickX(position).toFixed(1)) }, label)),
    xLabel && svg("text", { x: (width + left) / 2, y: height - 4, "text-anchor": "middle" }, xLabel),
    yLabel && svg("text", { x: 0, y: 0, transform: `translate(10 ${(height - bottom + TOP_MARGIN) / 2}) rotate(-90)`, "text-anchor": "middle" }, truncate(yLabel, Math.floor((height - bottom) / 5.6))),
    drawContent(x, y),
    referenceLine && svg("line", { x1: left, x2: width - RIGHT_MARGIN, y1: y(referenceLine.value), y2: y(referenceLine.value), class: "ch-reference-line" }, svg("title", null, referenceLine.name)));
};

const legendItem = (symbol, name) => h("span", null, svg("svg", { viewBox: "0 0 22 10", width: 22, height: 10, "aria-hidden": "true" }, symbol), name);
const referenceLegendItem = (referenceLine) => referenceLine && legendItem(svg("line", { x1: 0, x2: 22, y1: 5, y2: 5, class: "ch-reference-line" }), referenceLine.name);

const chartFigure = ({ title, caption = title, small: isSmall }, plot, legend, columns, rows, note) => h("figure", { class: `ch-chart${isSmall ? " ch-small-chart" : ""}` },
  caption && h("figcaption", { class: "ch-label" }, caption), plot, legend.some(Boolean) && h("div", { class: "ch-chart-legend" }, legend),
  note && h("p", { class: "ch-note" }, note),
  h("div", { class: "ch-details" }, collapsible("Values as a table", () => dataTable({ caption: title, columns, rows }))));

// A value with its interval, with as many decimals as the other values of its axis.
const formatInterval = ({ low: axisLow, high: axisHigh }, value, low, high) => {
  const format = (number) => (isMissing(number) ? formatNumber(number) : formatAligned(number, Math.max(Math.abs(axisLow), Math.abs(axisHigh))));
  return isMissing(low) || isMissing(value) ? format(value) : `${format(value)} [${format(low)}, ${format(high)}]`;
};

// The hue index of each series; controls are grey and use up no hue.
const assignHues = (series) => series.map((entry, index) => series.slice(0, index).filter((other) => Boolean(other.grey) === Boolean(entry.grey)).length);

const MARKERS = [
  (x, y) => svg("circle", { cx: x, cy: y, r: 2.8 }), (x, y) => svg("rect", { x: x - 2.6, y: y - 2.6, width: 5.2, height: 5.2 }),
  (x, y) => svg("path", { d: `M${x - 3.4},${y + 2.8}h6.8L${x},${y - 3.4}Z` }), (x, y) => svg("path", { d: `M${x},${y - 4}l4,4l-4,4l-4,-4Z` })];
const makeMarker = (index, x, y, title, isGrey) => {
  const marker = MARKERS[index % MARKERS.length](x, y);
  marker.style.setProperty("fill", getColour(index, isGrey));
  if (title) marker.append(svg("title", null, title));
  return marker;
};

// lines: name, x, y and, where there are intervals, low and high; grey: a control
export const lineChart = (chart) => {
  const { x_label: xLabel, lines, reference_line: referenceLine, dots: hasMarkers = lines.every((line) => line.x.length <= 26) } = chart;
  const xAxis = makeNumberAxis(lines.flatMap((line) => line.x), { isInteger: chart.integer_axis, isTight: true });
  const yAxis = makeNumberAxis([...lines.flatMap((line) => [...line.y, ...(line.low ?? []), ...(line.high ?? [])]), referenceLine?.value ?? 0], { range: chart.y_range });
  const hueIndices = assignHues(lines), makeLineStyle = (line, index) => ({ ...makeColourStyle(hueIndices[index], line.grey), "stroke-dasharray": line.grey ? DASHES[1 + hueIndices[index] % (DASHES.length - 1)] : DASHES[Math.floor(hueIndices[index] / SERIES_HUES.length) % DASHES.length] });
  const listFinite = (line) => [...line.x.keys()].filter((i) => !isMissing(line.y[i]));
  const description = lines.map((line) => { const finite = listFinite(line); return finite.length ? `${line.name} from ${formatNumber(line.y[finite[0]], 3)} to ${formatNumber(line.y[finite.at(-1)], 3)}` : line.name; }).join("; ");
  const plot = drawAxes(chart, xAxis, yAxis, description, (x, y) => {
    const path = (points) => points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
    const listBanded = (line) => listFinite(line).filter((i) => !isMissing(line.low[i]));
    return [
      lines.length <= MAX_BANDS && lines.map((line, index) => line.low && svg("path", { class: "ch-band", ...makeLineStyle(line, index), d: `${path(listBanded(line).map((i) => [line.x[i], line.low[i]]))}${path(listBanded(line).reverse().map((i) => [line.x[i], line.high[i]])).replace("M", "L")}Z` })),
      lines.map((line, index) => [svg("path", { class: "ch-line", ...makeLineStyle(line, index), d: path(listFinite(line).map((i) => [line.x[i], line.y[i]])) }, svg("title", null, line.name)),
        hasMarkers && listFinite(line).map((i) => makeMarker(hueIndices[index], x(line.x[i]), y(line.y[i]), `${line.point_names?.[i] ?? `${line.name}, ${xLabel ?? "x"} ${formatNumber(line.x[i], 3)}`}: ${formatInterval(yAxis, line.y[i], line.low?.[i], line.high?.[i])}`, line.grey))])];
  });
  const makeLegendItem = (line, index) => legendItem([svg("line", { class: "ch-line", x1: 0, x2: 22, y1: 5, y2: 5, ...makeLineStyle(line, index) }), hasMarkers && makeMarker(hueIndices[index], 11, 5, null, line.grey)], line.name);
  const xValues = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const formatCell = (line, position) => { const i = line.x.indexOf(position); return i < 0 ? "–" : formatInterval(yAxis, line.y[i], line.low?.[i], line.high?.[i]); };
  const bandNote = lines.length > MAX_BANDS && lines.some((line) => line.low) && `Intervals are not drawn for more than ${MAX_BANDS} lines: they are ${hasMarkers ? "in the tooltips and " : ""}in the table.`;
  return chartFigure(chart, plot, [...(lines.length > 1 || referenceLine ? lines.map(makeLegendItem) : []), referenceLegendItem(referenceLine)], [xLabel ?? "x", ...lines.map((line) => line.name)], xValues.map((position) => [formatNumber(position, 3), ...lines.map((line) => formatCell(line, position))]), bandNote);
};

// series: name, grey, cells – one for each group: value, low, high, count, mark (a sign above it), text,
// reference_value; null: no bar
export const barChart = (chart) => {
  const { x_label: xLabel, groups, series, stacked: isStacked, reference_line: referenceLine } = chart, cells = series.flatMap((entry) => entry.cells).filter(Boolean);
  const sums = groups.map((_, group) => series.reduce((sum, entry) => sum + (entry.cells[group]?.value ?? 0), 0));
  const yAxis = makeNumberAxis([...(isStacked ? sums : cells.flatMap((cell) => [cell.value, cell.low, cell.high, cell.reference_value])), referenceLine?.value ?? 0], { range: chart.y_range, isInteger: chart.integer_axis });
  const formatCell = (cell) => (cell === null ? "–" : cell.text ?? formatInterval(yAxis, cell.value, cell.low, cell.high) + (cell.count ? `, n = ${cell.count}` : "") + (cell.mark ? ` ${cell.mark}` : ""));
  const largest = series.map((entry) => { const strongest = entry.cells.reduce((bestIndex, cell, group) => (cell && !(cell.value <= (entry.cells[bestIndex]?.value ?? -Infinity)) ? group : bestIndex), 0); return `${entry.name || "largest"}: ${groups[strongest]} ${formatCell(entry.cells[strongest])}`; });
  const width = isStacked ? 0.9 : 0.84 / series.length;
  const plot = drawAxes(chart, makeNameAxis(groups, chart.sparse_labels ? 10 : 40), yAxis, `largest of ${largest.join("; ")}`, (x, y) => groups.map((group, position) => {
    let stackBase = 0;
    return series.map((entry, index) => {
      const cell = entry.cells[position];
      if (!cell) return null;
      const centre = position + (isStacked ? 0 : (index - (series.length - 1) / 2) * width), from = x(centre - width * 0.46), to = x(centre + width * 0.46), base = isStacked ? stackBase : 0, end = base + (cell.value ?? 0);
      stackBase = isStacked ? end : 0;
      const top = Math.min(y(base), y(end)), markBottom = isMissing(cell.high) ? top : Math.min(top, y(cell.high));
      return svg("g", null, svg("title", null, `${[group, entry.name].filter(Boolean).join(", ")}: ${formatCell(cell)}`),
        svg("rect", { class: "ch-bar-rect", x: from, width: Math.max(0.5, to - from), y: top, height: Math.abs(y(base) - y(end)), ...makeColourStyle(index, entry.grey) }),
        !isMissing(cell.low) && svg("line", { class: "ch-tick-line", x1: x(centre), x2: x(centre), y1: y(cell.low), y2: y(cell.high) }),
        !isMissing(cell.reference_value) && svg("line", { class: "ch-reference-line", x1: from - 2, x2: to + 2, y1: y(cell.reference_value), y2: y(cell.reference_value) }),
        cell.mark && svg("text", { class: "ch-emphasis", x: x(centre), y: markBottom - 3, "text-anchor": "middle" }, cell.mark));
    });
  }));
  const makeLegendItem = (entry, index) => legendItem(svg("rect", { class: "ch-bar-rect", x: 4, y: 0, width: 14, height: 10, ...makeColourStyle(index, entry.grey) }), entry.name);
  return chartFigure(chart, plot, [...(series.length > 1 ? series.map(makeLegendItem) : []), referenceLegendItem(referenceLine)], [xLabel ?? "", ...series.map((entry) => entry.name || chart.y_label)], groups.map((group, position) => [group, ...series.map((entry) => formatCell(entry.cells[position]))]));
};

// series: name, cells – one for each group: low, q1, median, q3, high, count; null: no box
export const boxChart = (chart) => {
  const { groups, series, reference_line: referenceLine } = chart, cells = series.flatMap((entry) => entry.cells).filter(Boolean), width = 0.8 / series.length;
  const yAxis = makeNumberAxis([...cells.flatMap((cell) => [cell.low, cell.high]), referenceLine?.value ?? 0], { range: chart.y_range });
  const formatCell = (cell) => (cell === null ? "–" : `${formatNumber(cell.median, 3)} [${formatNumber(cell.q1, 3)}, ${formatNumber(cell.q3, 3)}], ${cell.count}`);
  const plot = drawAxes(chart, makeNameAxis(groups), yAxis, `medians of ${groups.length} groups; the table below has them`, (x, y) => groups.map((group, position) => series.map((entry, index) => {
    const cell = entry.cells[position];
    if (!cell) return null;
    const centre = position + (index - (series.length - 1) / 2) * width, from = x(centre - width * 0.42), to = x(centre + width * 0.42), makeStem = (a, b) => svg("line", { class: "ch-tick-line", x1: x(centre), x2: x(centre), y1: y(a), y2: y(b) });
    return svg("g", null, svg("title", null, `${group}, ${entry.name}: median ${formatCell(cell)} inputs`), makeStem(cell.low, cell.q1), makeStem(cell.q3, cell.high),
      svg("rect", { class: "ch-bar-rect", x: from, width: to - from, y: y(cell.q3), height: Math.max(0.5, y(cell.q1) - y(cell.q3)), ...makeColourStyle(index) }),
      svg("line", { class: "ch-tick-line ch-median", x1: from, x2: to, y1: y(cell.median), y2: y(cell.median) }));
  })));
  const makeLegendItem = (entry, index) => legendItem(svg("rect", { class: "ch-bar-rect", x: 4, y: 0, width: 14, height: 10, ...makeColourStyle(index) }), entry.name);
  return chartFigure(chart, plot, [...series.map(makeLegendItem), referenceLegendItem(referenceLine)], ["", ...series.map((entry) => `${entry.name}: median [quartiles], inputs`)], groups.map((group, position) => [group, ...series.map((entry) => formatCell(entry.cells[position]))]));
};

// series: name, x, y, point_names; mean_curve: name, x, y, joined by a line
export const scatterChart = (chart) => {
  const { x_label: xLabel, y_label: yLabel, series, mean_curve: meanCurve, reference_line: referenceLine } = chart;
  const xAxis = makeNumberAxis(series.flatMap((entry) => entry.x), { range: chart.x_range, isInteger: chart.integer_axis, isTight: chart.integer_axis });
  const yAxis = makeNumberAxis([...series.flatMap((entry) => entry.y), referenceLine?.value ?? 0], { range: chart.y_range, isLog: chart.log_scale });
  const margin = (xAxis.high - xAxis.low) * 0.04; // so that no point is cut off at the frame
  xAxis.low -= margin;
  xAxis.high += margin;
  const description = meanCurve ? meanCurve.x.map((position, i) => `${formatNumber(position, 2)}: ${formatNumber(meanCurve.y[i], 3)}`).join("; ") : `${series.reduce((sum, entry) => sum + entry.x.length, 0)} points`;
  const plot = drawAxes(chart, xAxis, yAxis, `${meanCurve ? `${meanCurve.name} ` : ""}${description}`, (x, y) => [
    series.map((entry, index) => svg("g", { class: "ch-points" }, entry.x.map((position, i) => (isMissing(entry.y[i]) ? null : makeMarker(index, x(position), y(entry.y[i]), `${entry.point_names?.[i] ?? entry.name}: ${formatNumber(position, 3)}, ${formatNumber(entry.y[i], 3)}`, entry.grey))))),
    meanCurve && svg("path", { class: "ch-line ch-mean-curve", d: meanCurve.x.map((position, i) => `${i ? "L" : "M"}${x(position).toFixed(1)},${y(meanCurve.y[i]).toFixed(1)}`).join("") }, svg("title", null, meanCurve.name))]);
  const makeLegendItem = (entry, index) => legendItem(makeMarker(index, 11, 5, null, entry.grey), entry.name);
  const legend = [...(series.length > 1 || meanCurve ? series.map(makeLegendItem) : []), meanCurve && legendItem(svg("line", { class: "ch-line ch-mean-curve", x1: 0, x2: 22, y1: 5, y2: 5 }), meanCurve.name), referenceLegendItem(referenceLine)];
  const rows = [...(meanCurve ? meanCurve.x.map((position, i) => [meanCurve.name, formatNumber(position, 3), formatNumber(meanCurve.y[i], 3)]) : []), ...series.flatMap((entry) => entry.x.map((position, i) => [entry.point_names?.[i] ?? entry.name, formatNumber(position, 3), formatNumber(entry.y[i], 3)]))];
  return chartFigure(chart, plot, legend, ["", xLabel ?? "x", yLabel ?? "y"], rows);
};

// rows × columns of scores, or of unsigned weights; marks: cells with a dot; texts: of the cells
export const heatMap = (chart) => {
  const { title, rows, columns, texts, marks_note: marksNote, x_label: xLabel, y_label: yLabel, small: isSmall } = chart, values = decodeArray(chart.values);
  return h("figure", { class: "ch-chart ch-heat-map-chart" }, title && h("figcaption", { class: "ch-label" }, title),
    matrix({ rows, columns, values, vmax: chart.values.vmax, isUnsigned: chart.unsigned, marks: chart.marks, texts, label: title || `${yLabel} by ${xLabel}`, rowAxis: yLabel, showTexts: chart.show_texts, maxCellSize: chart.show_texts ? 46 : isSmall ? 18 : 26, maxWidth: isSmall ? 300 : 980,
      getTooltip: (row, column) => [[`${rows[row]}, ${columns[column]}`, texts?.[row][column] ?? formatNumber(values[row * columns.length + column], 3)]] }),
    h("p", { class: "ch-note" }, [`rows: ${yLabel}; columns: ${xLabel}; full colour is ${chart.vmax_label ?? formatNumber(chart.values.vmax, 3)}`, marksNote].filter(Boolean).join("; ")));
};

// Heat maps over images, side by side; each caption names its strongest patch.
export const imageOverlays = ({ title, maps }) => h("figure", { class: "ch-image-overlays" }, title && h("figcaption", { class: "ch-label" }, title),
  h("div", { class: "ch-small-maps" }, maps.map((entry) => {
    const values = [...decodeArray(entry.values)], [, columns] = entry.grid, strongest = values.reduce((bestIndex, value, position) => (Math.abs(value) > Math.abs(values[bestIndex]) ? position : bestIndex), 0);
    const description = `${entry.name}; strongest: row ${Math.floor(strongest / columns)}, column ${strongest % columns}: ${formatNumber(values[strongest], 3)}`;
    return smallHeatMaps({ grid: entry.grid, size: entry.size }, [values], entry.values.vmax, entry.image, [], [description]).firstChild;
  })));

export const CHARTS = { line_chart: lineChart, bar_chart: barChart, box_chart: boxChart, scatter_chart: scatterChart, heat_map: heatMap, image_overlays: imageOverlays };

// Result of a probe: means with their intervals, layer × head maps, and charts.
export const probeView = (viewModel, options = {}) => h("section", { class: "ch-input" },
  options.showHeading !== false && h("h2", null, viewModel.heading),
  h("p", { class: "ch-note" }, [viewModel.model, `${viewModel.num_inputs} inputs`, ...viewModel.settings.map((setting) => setting.join(" "))].join(" · ")),
  h("div", { class: "ch-card" }, intervalTable({ caption: "Means over inputs with 95 % intervals", rows: viewModel.estimates }),
    Object.entries(viewModel.maps).map(([title, encoded]) => h("div", null, h("p", { class: "ch-label" }, `${title}; full colour is ${formatNumber(encoded.vmax, 3)}`),
      matrix({ rows: numberNames("layer", encoded.shape[0]), columns: numberNames("head", encoded.shape[1]), values: decodeArray(encoded), vmax: encoded.vmax, label: title, maxCellSize: 26 }))),
    viewModel.charts.length > 0 && h("div", { class: "ch-charts" }, viewModel.charts.map((chart) => CHARTS[chart.view](chart))),
    h("p", { class: "ch-note" }, viewModel.conclusion)));

const numberNames = (prefix, count) => Array.from({ length: count }, (_, index) => `${prefix} ${index}`);
