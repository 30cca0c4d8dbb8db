// Text as it was written, each unit on its colour; audio as bars over time.
import { h } from "./dom.js";
import { formatNumber, isMissing } from "./format.js";
import { applyColour } from "./colour.js";
import { addKeyboardCursor, hideTooltip, showTooltip } from "./tooltip.js";

// scale: { lines, scores, vmax, evidence }; getTooltip(unit): lines of the tooltip; onHover(unit or null)
export const scoredText = (scale, isVerbatim, getTooltip, onHover) => {
  const evidence = new Set(scale.evidence ?? []), units = [];
  const span = ([text, unit, kind]) => {
    if (unit === undefined) return text;
    if (kind === "u") return h("span", { class: "ch-truncated", title: "truncated: not part of the model input" }, text);
    const extraClasses = { x: " ch-special", h: " ch-empty" }[kind] ?? "";
    const element = h("span", { class: `ch-unit${extraClasses}${evidence.has(unit) ? " ch-evidence" : ""}`, "data-unit": unit }, text);
    units[unit] = element;
    return applyColour(element, scale.scores[unit], scale.vmax);
  };
  const lines = scale.lines.map((line) =>
    h("p", { class: isVerbatim ? "ch-text" : "ch-text ch-token-names", dir: "auto", lang: "" }, line.map(span)));
  const box = h("div", { class: "ch-text-box", tabindex: 0, role: "group", "aria-label": "The input with its scores: arrow keys move from unit to unit" }, lines);

  let activeElement = null;
  const showUnit = (unit, announce) => {
    activeElement?.classList.remove("ch-active");
    activeElement = units[unit];
    if (!activeElement) return;
    activeElement.classList.add("ch-active");
    const rects = activeElement.getClientRects();
    showTooltip(box, getTooltip(unit), rects[rects.length - 1] ?? activeElement.getBoundingClientRect(), announce);
    if (announce) activeElement.scrollIntoView({ block: "nearest" });
    onHover?.(unit);
  };
  const clearSelection = () => {
    activeElement?.classList.remove("ch-active");
    activeElement = null;
    hideTooltip(box);
    onHover?.(null);
  };
  const moveTo = addKeyboardCursor(box, () => [1, units.length], (_, unit) => showUnit(unit, true), clearSelection);
  box.addEventListener("pointerover", (event) => {
    const unit = event.target.closest?.(".ch-unit")?.dataset.unit;
    if (unit === undefined) return clearSelection();
    showUnit(Number(unit));
    moveTo(0, Number(unit));
  });
  box.addEventListener("pointerleave", clearSelection);
  return box;
};

// Audio frames as bars over time, up for the target and down against it.
export const audioTimeline = (segments, vmax, isSigned) => {
  const bars = segments.map(([label, value]) => {
    const height = isMissing(value) ? 0 : Math.min(1, Math.abs(value) / vmax);
    const className = value < 0 ? "ch-audio-segment ch-negative" : "ch-audio-segment";
    return applyColour(h("i", { class: className, title: `${label}: ${formatNumber(value, 6)}`, style: { "--height": height } }), value, vmax);
  });
  const names = segments.map(([label]) => label.split(" … ")[0]);
  return h("figure", { class: "ch-audio" },
    h("div", { class: `ch-timeline${isSigned ? " ch-signed" : ""}`, role: "img", "aria-label": "The score of each frame" }, bars),
    h("figcaption", null, [0, Math.floor(names.length / 2), names.length - 1].map((index) => h("span", null, names[index]))));
};
