// Text as it was written, each unit on its colour; a sound as bars over time.
import { h } from "./dom.js";
import { number } from "./format.js";
import { isMissing } from "./format.js";
import { paint } from "./colour.js";
import { cursor, hush, tell } from "./tip.js";

// scale: { lines, scores, full, evidence }; told(unit): the lines to say; point(unit or null): others may follow
export const text = (scale, asWritten, told, point) => {
  const marked = new Set(scale.evidence ?? []), units = [];
  const span = ([words, unit, kind]) => {
    if (unit === undefined) return words;
    if (kind === "u") return h("span", { class: "ch-cut", title: "truncated: not part of the model input" }, words);
    const more = { x: " ch-x", h: " ch-h" }[kind] ?? "";
    const made = h("span", { class: `ch-u${more}${marked.has(unit) ? " ch-human" : ""}`, "data-unit": unit }, words);
    units[unit] = made;
    return paint(made, scale.scores[unit], scale.full);
  };
  const lines = scale.lines.map((line) =>
    h("p", { class: asWritten ? "ch-text" : "ch-text ch-names", dir: "auto", lang: "" }, line.map(span)));
  const box = h("div", { class: "ch-reading", tabindex: 0, role: "group", "aria-label": "The input with its scores: arrow keys move from unit to unit" }, lines);

  let at = null;
  const show = (unit, aloud) => {
    at?.classList.remove("ch-on");
    at = units[unit];
    if (!at) return;
    at.classList.add("ch-on");
    const boxes = at.getClientRects();
    tell(box, told(unit), boxes[boxes.length - 1] ?? at.getBoundingClientRect(), aloud);
    if (aloud) at.scrollIntoView({ block: "nearest" });
    point?.(unit);
  };
  const leave = () => {
    at?.classList.remove("ch-on");
    at = null;
    hush(box);
    point?.(null);
  };
  const moveTo = cursor(box, () => [1, units.length], (_, unit) => show(unit, true), leave);
  box.addEventListener("pointerover", (event) => {
    const unit = event.target.closest?.(".ch-u")?.dataset.unit;
    if (unit === undefined) return leave();
    show(Number(unit));
    moveTo(0, Number(unit));
  });
  box.addEventListener("pointerleave", leave);
  return box;
};

// A sound's frames as bars over time, up for the target and down against it.
export const overTime = (moments, full, signed) => {
  const bars = moments.map(([label, value]) => {
    const high = isMissing(value) ? 0 : Math.min(1, Math.abs(value) / full);
    const side = value < 0 ? "ch-moment ch-down" : "ch-moment";
    return paint(h("i", { class: side, title: `${label}: ${number(value, 6)}`, style: { "--h": high } }), value, full);
  });
  const names = moments.map(([label]) => label.split(" … ")[0]);
  return h("figure", { class: "ch-frames" },
    h("div", { class: `ch-time${signed ? " ch-both" : ""}`, role: "img", "aria-label": "The score of each frame" }, bars),
    h("figcaption", null, [0, Math.floor(names.length / 2), names.length - 1].map((place) => h("span", null, names[place]))));
};
