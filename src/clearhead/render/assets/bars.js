// Bars with their values as text, for units and for predictions; the colour legend; the force plot.
import { h, svg, segmentedControl } from "./dom.js";
import { LEVELS } from "./palette.js";
import { formatAligned, isMissing, formatNumber, truncate } from "./format.js";
import { applyColour, applySignColour } from "./colour.js";

// A bar from the zero line, to the right or to the left; empty if there is no score.
export const scoreBar = (fraction, isSigned, isPlain = false) => {
  const zeroPercent = isSigned ? 50 : 0, width = isMissing(fraction) ? 0 : (100 - zeroPercent) * Math.min(1, Math.abs(fraction));
  const fill = h("i", { style: { left: `${fraction < 0 ? zeroPercent - width : zeroPercent}%`, width: `${width}%` } });
  if (!isPlain) applySignColour(fill, fraction);
  return h("div", { class: "ch-bar", "aria-hidden": "true", style: { "--zero": `${zeroPercent}%` } }, width > 0 && fill);
};

// A score, with the half-width of its interval if it has one.
const formatScoreWithInterval = (scale, index) => {
  const text = formatAligned(scale.scores[index], scale.vmax), bounds = scale.intervals?.[index];
  return bounds && !isMissing(bounds[0]) ? `${text} ± ${formatAligned((bounds[1] - bounds[0]) / 2, scale.vmax)}` : text;
};

// Units as bars. scale: { labels, special, scores, vmax, containingWords, intervals, intervalLevel }
export const scoreBars = (caption, scale, indices, formatScore) => {
  const isSigned = indices.some((index) => scale.scores[index] < 0);
  const intervalNote = scale.intervals ? ` ± ${formatNumber(100 * scale.intervalLevel, 3)} % interval` : "";
  return h("table", { class: scale.intervals ? "ch-scores ch-with-intervals" : "ch-scores" }, h("caption", null, caption + intervalNote), h("tbody", null, indices.map((index) => {
    const value = scale.scores[index], containingWord = scale.containingWords?.[index];
    return h("tr", { "data-unit": index },
      h("th", { scope: "row", class: scale.special[index] && "ch-muted" },
        h("bdi", null, scale.labels[index]), containingWord && [" ", h("bdi", { class: "ch-containing-word" }, containingWord)]),
      h("td", null, scoreBar(value / scale.vmax, isSigned)),
      h("td", { title: formatNumber(value, 6) }, formatScore ? formatScore(index) : formatScoreWithInterval(scale, index)));
  })));
};

// The units with the largest |score|, the largest first; special ones left out if there are others.
export const findStrongest = (scale, count) => {
  const contentIndices = scale.scores.map((_, index) => index).filter((index) => !scale.special[index]);
  const getMagnitude = (index) => (isMissing(scale.scores[index]) ? -1 : Math.abs(scale.scores[index]));
  return (contentIndices.length ? contentIndices : scale.scores.map((_, index) => index)).sort((a, b) => getMagnitude(b) - getMagnitude(a)).slice(0, count);
};

// All scores: in the order of the input, from the highest to the lowest, or by size whatever the sign.
export const allScores = (scale) => {
  const box = h("div"), inputOrder = scale.scores.map((_, index) => index), getScore = (index) => (isMissing(scale.scores[index]) ? -Infinity : scale.scores[index]);
  const bySize = [...new Set([...findStrongest(scale, inputOrder.length), ...inputOrder])];
  const ranked = [...bySize].sort((a, b) => scale.special[a] - scale.special[b] || getScore(b) - getScore(a));
  const ORDERS = [["As in the input", inputOrder, "Raw scores in the order of the input"], ["Ranked", ranked, "The highest score first; special tokens at the end"],
    ["By absolute value", bySize, "The largest absolute score first; special tokens at the end"]];
  const show = (order) => box.replaceChildren(scoreBars(ORDERS[order][2], scale, ORDERS[order][1]));
  show(0);
  return [segmentedControl("Order of the scores", ORDERS.map(([name]) => name), 0, show), box];
};

// The colour scale with its bounds, and notes.
export const colourLegend = (scale, isSigned, notes, isOverImage = false) => {
  const steps = [];
  for (let step = isSigned ? -LEVELS : 0; step <= LEVELS; step += 2) steps.push(applyColour(h("i"), step, LEVELS));
  const vmax = formatNumber(scale.vmax, 3);
  const line = h("div", { class: "ch-legend" },
    h("span", null, isSigned ? `−${vmax} against` : "0"), h("span", { class: `ch-colour-ramp${isOverImage ? " ch-over-image" : ""}`, "aria-hidden": "true" }, steps),
    h("span", null, isSigned ? `${vmax} for` : vmax));
  return h("div", null, line, notes.length > 0 && h("p", { class: "ch-note" }, notes.join("; ")));
};

// Labels with their probabilities; buttons where the page can explain another label.
export const predictionTable = ({ caption, rows }, onLabel) => rows.length > 0 &&
  h("table", { class: "ch-scores" }, h("caption", null, caption), h("tbody", null, rows.map((row) =>
    h("tr", { class: row.is_explained && "ch-explained" },
      h("th", { scope: "row" }, onLabel
        ? h("button", { type: "button", class: "ch-chip", title: `Explain ${row.label}`, click: () => onLabel(row) }, h("bdi", null, row.label))
        : h("bdi", null, row.label)),
      h("td", null, row.probability === null ? "" : scoreBar(row.probability, false, true)),
      h("td", null, row.text)))));

// From the base value to the output: positive scores end at the output, negative ones begin there.
export const forcePlot = ({ base_value: base, value: modelOutput, scale: unit }, streams) => {
  const labelledScores = streams.flatMap(({ labels, scores }) => scores.map((score, index) => [labels[index], score ?? 0]));
  const positive = labelledScores.filter(([, score]) => score > 0).sort((a, b) => b[1] - a[1]);
  const negative = labelledScores.filter(([, score]) => score < 0).sort((a, b) => a[1] - b[1]);
  const total = (entries) => entries.reduce((sum, [, score]) => sum + score, 0);
  const output = base + total(positive) + total(negative);
  const low = Math.min(base, output - total(positive)), high = Math.max(base, output - total(negative));
  const WIDTH = 640, toX = (value) => 14 + (value - low) / (high - low || 1) * (WIDTH - 28);
  const makeArrows = (entries, sign) => {
    let end = output;
    return entries.map(([label, score]) => {
      const start = end - score, [from, to] = [Math.min(toX(start), toX(end)), Math.max(toX(start), toX(end))];
      const tipWidth = Math.min(6, to - from), direction = sign > 0 ? -1 : 1, edge = sign > 0 ? to : from, tail = sign > 0 ? from : to;
      const points = [[tail, 30], [edge + direction * tipWidth, 30], [edge, 42], [edge + direction * tipWidth, 54], [tail, 54]];
      end = start;
      const arrow = applySignColour(svg("polygon", { class: "ch-force-arrow", points: points.map((point) => point.map((value) => value.toFixed(1)).join()).join(" ") },
        svg("title", null, `${label}: ${formatNumber(score, 4)}`)), sign);
      const labelFits = to - from > 7 * truncate(label, 14).length + 6;
      return [arrow, labelFits && svg("text", { x: (from + to) / 2, y: 70, "text-anchor": "middle" }, truncate(label, 14))];
    });
  };
  const makeMark = (value, text, anchor) => [
    svg("line", { x1: toX(value), x2: toX(value), y1: 20, y2: 58, class: "ch-tick-line" }),
    svg("text", { x: toX(value), y: 14, "text-anchor": anchor, class: "ch-emphasis" }, text)];
  // The two labels are outside their marks, or inside where there is no room.
  const leftmost = Math.min(base, output);
  const getAnchor = (value) => (toX(value) < 90 ? "start" : toX(value) > WIDTH - 90 ? "end" : value === leftmost ? "end" : "start");
  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} 80`, class: "ch-force-plot", role: "img", "aria-label": "From the base value to the output" },
    makeArrows(positive, 1), makeArrows(negative, -1), makeMark(base, `base ${formatNumber(base, 3)}`, getAnchor(base)), makeMark(output, `output ${formatNumber(output, 3)}`, getAnchor(output)));
  const unexplained = modelOutput - output;
  const text = `${formatNumber(base, 3)} + ${formatNumber(total(positive), 3)} for − ${formatNumber(-total(negative), 3)} against = ${formatNumber(output, 3)}`;
  const gapNote = Math.abs(unexplained) > 1e-3 * Math.max(Math.abs(modelOutput), 1e-9) ? `; the ${unit ?? "value"} itself is ${formatNumber(modelOutput, 3)}, so ${formatNumber(unexplained, 2)} is not accounted for` : "";
  return h("figure", null, plot, h("figcaption", { class: "ch-note" }, text + gapNote));
};
