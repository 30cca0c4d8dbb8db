// Two columns with lines between them, thicker for stronger links: a head's units, or the words and regions of an image.
import { h, segmentedControl, decodeArray } from "./dom.js";
import { formatNumber, truncate } from "./format.js";
import { resolveColour, redrawOnThemeChange } from "./colour.js";
import { imageElement, boxStyle } from "./image.js";
import { addKeyboardCursor, hideTooltip, showTooltip } from "./tooltip.js";

const WIDTH = 180;

// allLinks: [left, right, weight from 0 to 1]; getUnitLinks(side, unit): all links of one unit, if `allLinks` is incomplete
// names and verbs: of the two columns; onHover(side, unit or null): called for the unit under the pointer
export const linkDiagram = ({ left, right, allLinks, getUnitLinks, names, verbs, onHover }) => {
  const sides = [left, right], maxUnits = Math.max(left.length, right.length), rowHeight = maxUnits <= 40 ? 22 : 15, height = maxUnits * rowHeight;
  const canvas = h("canvas", { class: "ch-canvas", "aria-hidden": "true" });
  const findLinks = (side, unit) => getUnitLinks?.(side, unit) ?? allLinks.filter((link) => link[side] === unit);
  let activeUnit = null;
  const draw = () => {
    const scale = Math.min(Math.max(1, devicePixelRatio), 15000 / height), context = canvas.getContext("2d");
    canvas.width = WIDTH * scale;
    canvas.height = height * scale;
    canvas.style.width = `${WIDTH}px`;
    canvas.style.height = `${height}px`;
    context.scale(scale, scale);
    context.strokeStyle = resolveColour(canvas.parentElement, "--link");
    // Relative to the strongest link that is shown: over many units all weights are small.
    const shownLinks = activeUnit ? findLinks(...activeUnit) : allLinks, maxWeight = shownLinks.reduce((largest, link) => Math.max(largest, link[2]), 1e-9);
    for (const [from, to, weight] of shownLinks) {
      const strength = (weight / maxWeight) ** 1.5;
      if (strength < 0.02) continue;
      context.globalAlpha = strength;
      context.lineWidth = 0.6 + 2.4 * strength;
      context.beginPath();
      context.moveTo(0, (from + 0.5) * rowHeight);
      context.bezierCurveTo(WIDTH / 2, (from + 0.5) * rowHeight, WIDTH / 2, (to + 0.5) * rowHeight, WIDTH, (to + 0.5) * rowHeight);
      context.stroke();
    }
  };
  const makeTooltip = (side, unit) => [[`${sides[side][unit]} ${verbs[side]}`, ""],
    ...findLinks(side, unit).sort((a, b) => b[2] - a[2]).slice(0, 5).map((link) => [sides[1 - side][link[1 - side]], formatNumber(link[2], 2)])];
  const showUnitInColumn = [];
  const makeColumn = (side) => {
    const items = sides[side].map((name, unit) => h("li", { "data-unit": unit, style: { height: `${rowHeight}px` } }, h("bdi", null, truncate(name, 16))));
    const list = h("ol", { class: "ch-link-column", tabindex: 0, "aria-label": names[side] }, items);
    const showUnit = (unit, announce) => {
      activeUnit = [side, unit];
      items.forEach((item, index) => item.classList.toggle("ch-active", index === unit));
      draw();
      showTooltip(list, makeTooltip(side, unit), items[unit].getBoundingClientRect(), announce);
      if (announce) items[unit].scrollIntoView({ block: "nearest" });
      onHover?.(side, unit);
    };
    const clearSelection = () => {
      activeUnit = null;
      items.forEach((item) => item.classList.remove("ch-active"));
      draw();
      hideTooltip(list);
      onHover?.(side, null);
    };
    const moveTo = addKeyboardCursor(list, () => [1, items.length], (_, unit) => showUnit(unit, true), clearSelection);
    list.addEventListener("pointerover", (event) => {
      const unit = event.target.closest("li")?.dataset.unit;
      if (unit === undefined) return;
      showUnit(Number(unit));
      moveTo(0, Number(unit));
    });
    list.addEventListener("pointerleave", clearSelection);
    showUnitInColumn[side] = (unit) => {
      if (unit === null) return clearSelection();
      showUnit(unit);
      const item = items[unit]; // scrolled into view without moving the page
      frame.scrollTop = Math.max(Math.min(frame.scrollTop, item.offsetTop - frame.offsetTop), item.offsetTop - frame.offsetTop + item.offsetHeight - frame.clientHeight);
    };
    return list;
  };
  const frame = h("div", { class: "ch-scroll ch-links", tabindex: 0, role: "region", "aria-label": `${names[0]} and ${names[1].toLowerCase()}` }, makeColumn(0), canvas, makeColumn(1));
  const observer = new ResizeObserver(() => { if (canvas.isConnected) { observer.disconnect(); draw(); } });
  observer.observe(frame);
  redrawOnThemeChange(canvas, draw);
  frame.showUnit = (side, unit) => showUnitInColumn[side](unit);
  return frame;
};

// Attention between the units of two streams, in one direction or the other. The regions that the unit under the pointer
// attends to are highlighted in the image, and pointing at a region shows its links.
export const streamLinks = ({ directions, streams }, image) => {
  const box = h("div");
  const show = (index) => box.replaceChildren(directionView(directions[index], streams, image));
  show(0);
  const formatDirection = ({ from, to }) => `${streams[from].title} → ${streams[to].title.toLowerCase()}`;
  return h("section", { class: "ch-panel" }, h("h3", null, `${streams[directions[0].from].title} and ${streams[directions[0].to].title.toLowerCase()}`),
    directions.length > 1 && segmentedControl("Direction of attention", directions.map(formatDirection), 0, show), box);
};

const directionView = ({ from, to, weights, description }, streams, image) => {
  const values = decodeArray(weights), [, width] = weights.shape, vmax = weights.vmax, sides = [streams[from], streams[to]];
  const allLinks = Array.from(values, (weight, index) => [Math.floor(index / width), index % width, weight]);
  const imageSide = sides.findIndex(({ boxes }) => boxes), boxes = sides[imageSide]?.boxes;
  const getRelativeWeight = (side, unit, other) => (side === 0 ? values[unit * width + other] : values[other * width + unit]) / vmax;
  const regionHighlights = image && boxes ? boxes.map((box, unit) => box && h("i", { class: "ch-region-highlight", "data-unit": unit, style: boxStyle(box),
    pointerenter: () => frame.showUnit(imageSide, unit), pointerleave: () => frame.showUnit(imageSide, null) })) : [];
  const highlightRegions = (side, unit) => regionHighlights.forEach((element, other) =>
    element?.style.setProperty("--strength", unit === null ? 0 : side === imageSide ? Number(other === unit) : getRelativeWeight(side, unit, other)));
  const frame = linkDiagram({ left: sides[0].labels, right: sides[1].labels, allLinks, names: sides.map(({ title }) => title), verbs: ["attends to", "is attended to by"], onHover: highlightRegions });
  const regionFigure = regionHighlights.length > 0 && h("figure", { class: "ch-regions" }, h("div", { class: "ch-image-stack" }, imageElement(image, "The image", true), regionHighlights));
  return h("div", null, h("p", { class: "ch-note" }, `${description}; the strongest link is ${formatNumber(vmax, 3)}. Point at a unit to show only its links.`),
    h("div", { class: "ch-columns ch-links-and-image" }, frame, regionFigure));
};
