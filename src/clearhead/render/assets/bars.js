// Bars with their figures as text: units, labels, words of many inputs; the legend; from the base value to the output.
import { h, svg, choice } from "./dom.js";
import { LEVELS } from "./palette.js";
import { aligned, isMissing, number, short } from "./format.js";
import { paint, paintSign } from "./colour.js";

// A bar from the zero line, to the right or to the left; nothing for no score.
export const bar = (share, signed, plain = false) => {
  const zero = signed ? 50 : 0, width = isMissing(share) ? 0 : (100 - zero) * Math.min(1, Math.abs(share));
  const inner = h("i", { style: { left: `${share < 0 ? zero - width : zero}%`, width: `${width}%` } });
  if (!plain) paintSign(inner, share);
  return h("div", { class: "ch-bar", "aria-hidden": "true", style: { "--zero": `${zero}%` } }, width > 0 && inner);
};

// Units as bars. scale: { labels, special, scores, full, inside }
export const bars = (caption, scale, places, said) => {
  const signed = places.some((place) => scale.scores[place] < 0);
  return h("table", { class: "ch-scores" }, h("caption", null, caption), h("tbody", null, places.map((place) => {
    const value = scale.scores[place], word = scale.inside?.[place];
    return h("tr", { "data-unit": place },
      h("th", { scope: "row", class: scale.special[place] && "ch-off" },
        h("bdi", null, scale.labels[place]), word && [" ", h("bdi", { class: "ch-in" }, word)]),
      h("td", null, bar(value / scale.full, signed)),
      h("td", { title: number(value, 6) }, said ? said(place) : aligned(value, scale.full)));
  })));
};

// The units with the largest |score|, the largest first; special ones left out if there are others.
export const strongest = (scale, count) => {
  const kept = scale.scores.map((_, place) => place).filter((place) => !scale.special[place]);
  const size = (place) => (isMissing(scale.scores[place]) ? -1 : Math.abs(scale.scores[place]));
  return (kept.length ? kept : scale.scores.map((_, place) => place)).sort((a, b) => size(b) - size(a)).slice(0, count);
};

// All scores: in the order of the input, from the highest to the lowest, or by size whatever the sign.
export const everyScore = (scale) => {
  const box = h("div"), input = scale.scores.map((_, place) => place), height = (place) => (isMissing(scale.scores[place]) ? -Infinity : scale.scores[place]);
  const bySize = [...new Set([...strongest(scale, input.length), ...input])];
  const ranked = [...bySize].sort((a, b) => scale.special[a] - scale.special[b] || height(b) - height(a));
  const ORDERS = [["As in the input", input, "Raw scores in the order of the input"], ["Ranked", ranked, "The highest score first; special tokens at the end"],
    ["By absolute value", bySize, "The largest absolute score first; special tokens at the end"]];
  const show = (order) => box.replaceChildren(bars(ORDERS[order][2], scale, ORDERS[order][1]));
  show(0);
  return [choice("Order of the scores", ORDERS.map(([name]) => name), 0, show), box];
};

// What the colours stand for.
export const legend = (scale, signed, notes, overPicture = false) => {
  const steps = [];
  for (let step = signed ? -LEVELS : 0; step <= LEVELS; step += 2) steps.push(paint(h("i"), step, LEVELS));
  const full = number(scale.full, 3);
  const line = h("div", { class: "ch-legend" },
    h("span", null, signed ? `−${full} against` : "0"), h("span", { class: `ch-ramp${overPicture ? " ch-over" : ""}`, "aria-hidden": "true" }, steps),
    h("span", null, signed ? `${full} for` : full));
  return h("div", null, line, notes.length > 0 && h("p", { class: "ch-note" }, notes.join("; ")));
};

// Labels with their shares; buttons where the page can explain another one.
export const prediction = ({ caption, rows }, onLabel) => rows.length > 0 &&
  h("table", { class: "ch-scores" }, h("caption", null, caption), h("tbody", null, rows.map((row) =>
    h("tr", { class: row.chosen && "ch-chosen" },
      h("th", { scope: "row" }, onLabel
        ? h("button", { type: "button", class: "ch-chip", title: `Explain ${row.label}`, click: () => onLabel(row) }, h("bdi", null, row.label))
        : h("bdi", null, row.label)),
      h("td", null, row.share === null ? "" : bar(row.share, false, true)),
      h("td", null, row.said)))));

// From the base value to the output: what pushes up ends at the output, what pushes down begins there.
export const force = ({ base, value, scale: unit }, streams) => {
  const every = streams.flatMap(({ labels, scores }) => scores.map((score, place) => [labels[place], score ?? 0]));
  const up = every.filter(([, score]) => score > 0).sort((a, b) => b[1] - a[1]);
  const down = every.filter(([, score]) => score < 0).sort((a, b) => a[1] - b[1]);
  const total = (part) => part.reduce((sum, [, score]) => sum + score, 0);
  const reached = base + total(up) + total(down);
  const low = Math.min(base, reached - total(up)), high = Math.max(base, reached - total(down));
  const WIDE = 640, x = (at) => 14 + (at - low) / (high - low || 1) * (WIDE - 28);
  const pushed = (part, sign) => {
    let end = reached;
    return part.map(([label, score]) => {
      const start = end - score, [from, to] = [Math.min(x(start), x(end)), Math.max(x(start), x(end))];
      const tip = Math.min(6, to - from), back = sign > 0 ? -1 : 1, edge = sign > 0 ? to : from, root = sign > 0 ? from : to;
      const points = [[root, 30], [edge + back * tip, 30], [edge, 42], [edge + back * tip, 54], [root, 54]];
      end = start;
      const shape = paintSign(svg("polygon", { class: "ch-push", points: points.map((point) => point.map((at) => at.toFixed(1)).join()).join(" ") },
        svg("title", null, `${label}: ${number(score, 4)}`)), sign);
      const fits = to - from > 7 * short(label, 14).length + 6;
      return [shape, fits && svg("text", { x: (from + to) / 2, y: 70, "text-anchor": "middle" }, short(label, 14))];
    });
  };
  const mark = (at, words, anchor) => [
    svg("line", { x1: x(at), x2: x(at), y1: 20, y2: 58, class: "ch-mark" }),
    svg("text", { x: x(at), y: 14, "text-anchor": anchor, class: "ch-strong" }, words)];
  // The two names stand on the outer sides of their marks, or inside where there is no room.
  const first = Math.min(base, reached);
  const side = (at) => (x(at) < 90 ? "start" : x(at) > WIDE - 90 ? "end" : at === first ? "end" : "start");
  const picture = svg("svg", { viewBox: `0 0 ${WIDE} 80`, class: "ch-force", role: "img", "aria-label": "From the base value to the output" },
    pushed(up, 1), pushed(down, -1), mark(base, `base ${number(base, 3)}`, side(base)), mark(reached, `output ${number(reached, 3)}`, side(reached)));
  const gap = value - reached;
  const words = `${number(base, 3)} + ${number(total(up), 3)} for − ${number(-total(down), 3)} against = ${number(reached, 3)}`;
  const rest = Math.abs(gap) > 1e-3 * Math.max(Math.abs(value), 1e-9) ? `; the ${unit ?? "value"} itself is ${number(value, 3)}, so ${number(gap, 2)} is not accounted for` : "";
  return h("figure", null, picture, h("figcaption", { class: "ch-note" }, words + rest));
};
