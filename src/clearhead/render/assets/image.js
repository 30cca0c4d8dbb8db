// Scores over an image: a smooth heat map or its patches with an opacity, a mask above a threshold; boxes of regions and of
// detected objects. Images use the light theme on every page, because a photograph has no dark version.
import { h, segmentedControl } from "./dom.js";
import { isMissing, formatNumber } from "./format.js";
import { getOverlayColour, toColourLevel, applyColour, getSeriesColour } from "./colour.js";
import { LEVELS } from "./palette.js";
import { addKeyboardCursor, hideTooltip, showTooltip } from "./tooltip.js";

const toPercent = (fraction) => `${(100 * Math.max(0, Math.min(1, fraction))).toFixed(2)}%`;
export const boxStyle = ([left, top, right, bottom]) => {
  const clip = (position) => Math.max(0, Math.min(1, position));
  return { left: toPercent(left), top: toPercent(top), width: toPercent(clip(right) - clip(left)), height: toPercent(clip(bottom) - clip(top)) };
};

export const imageElement = (image, alt, isGrey) => h("img", { src: image.src, alt, width: image.width, height: image.height,
  class: `${image.is_small ? "ch-pixelated" : ""}${isGrey ? " ch-greyscale" : ""}` });

// Boxes of detected objects: of all, or of one step; on request with names and each in its own colour. A name is above its
// box, or inside it where there is no room above, and right-aligned near the right edge of the image.
export const detectionBoxes = (boxes, hasLabels, onlyStep = null, isObjectColoured = false) => boxes.filter(({ step }) => onlyStep === null || step === onlyStep).map(({ step, label, box }) => {
  const colour = isObjectColoured && getObjectColour(step), labelClasses = `${box[1] < 0.09 ? " ch-label-inside" : ""}${box[0] > 0.7 ? " ch-label-right" : ""}`;
  return h("i", { class: `ch-detection-box${isObjectColoured ? " ch-object-box" : ""}${labelClasses}`, style: { ...boxStyle(box), ...(isObjectColoured && { "border-color": colour }) }, title: label },
    hasLabels && h("b", { style: isObjectColoured ? { background: colour } : {} }, label));
});
const getObjectColour = (step) => getSeriesColour(step, 0.56); // dark enough for white letters

export const modelInputImage = (image, boxes) => h("figure", { class: "ch-input-image" },
  h("div", { class: "ch-image-stack" }, imageElement(image, "The image after preprocessing"), detectionBoxes(boxes, true)),
  h("figcaption", { class: "ch-note" }, "Model input"));

// Bilinear interpolation between the centres of patches; patches without a score are left out.
const interpolate = (values, rows, columns, height, width) => {
  const pixels = new Float32Array(height * width);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const row = (y + 0.5) * rows / height - 0.5, column = (x + 0.5) * columns / width - 0.5;
    const top = Math.floor(row), left = Math.floor(column);
    let sum = 0, weight = 0;
    for (const [rowOffset, columnOffset] of [[0, 0], [0, 1], [1, 0], [1, 1]]) {
      const neighbourRow = Math.max(0, Math.min(rows - 1, top + rowOffset)), neighbourColumn = Math.max(0, Math.min(columns - 1, left + columnOffset));
      const fraction = (rowOffset ? row - top : 1 - row + top) * (columnOffset ? column - left : 1 - column + left), value = values[neighbourRow * columns + neighbourColumn];
      if (!isMissing(value)) { sum += fraction * value; weight += fraction; }
    }
    pixels[y * width + x] = weight >= 0.5 ? sum / weight : NaN;
  }
  return pixels;
};

// Draws a mask in one colour, its interior transparent and its edge opaque. Returns its number of pixels.
const drawMask = (context, values, cutoff, height, width, colour, innerOpacity) => {
  const maskCanvas = h("canvas", { width, height }), maskContext = maskCanvas.getContext("2d"), imageData = maskContext.createImageData(width, height);
  const isInside = (y, x) => y >= 0 && x >= 0 && y < height && x < width && values[y * width + x] >= cutoff;
  let numPixels = 0;
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) if (isInside(y, x)) {
    const isInterior = isInside(y - 1, x) && isInside(y + 1, x) && isInside(y, x - 1) && isInside(y, x + 1);
    imageData.data[4 * (y * width + x) + 3] = isInterior ? innerOpacity : 255;
    numPixels++;
  }
  maskContext.putImageData(imageData, 0, 0);
  maskContext.globalCompositeOperation = "source-in";
  maskContext.fillStyle = colour;
  maskContext.fillRect(0, 0, width, height);
  context.drawImage(maskCanvas, 0, 0);
  return numPixels;
};

// Draws the mask of each object, as Explanation.mask computes it, in its own colour; returns the fraction of pixels in each.
// objects: { step, scores, cutoff }
const drawMasks = (canvas, objects, rows, columns, height, width, innerOpacity) => {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  return objects.map(({ step, scores, cutoff }) => (isMissing(cutoff) ? 0 :
    drawMask(context, interpolate(scores, rows, columns, height, width), cutoff, height, width, getObjectColour(step), innerOpacity) / (height * width)));
};

// Paints one pixel for each value; getColour(value): red, green, blue, opacity.
const paintPixels = (canvas, values, rows, columns, getColour) => {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), imageData = context.createImageData(columns, rows);
  values.forEach((value, index) => imageData.data.set(getColour(value), index * 4));
  context.putImageData(imageData, 0, 0);
};

const DISPLAY_MODES = ["Heat map", "Patches", "Mask", "Objects"], DEFAULT_OPACITY = 85;

// stream: grid, size, objects (of a detector: step, scores, cutoff); scale: scores of the patches in
// their order, vmax, cutoff
// getTooltip(patch): lines of the tooltip
export const heatMapOverlay = (stream, scale, image, boxes, state, getTooltip, onlyStep) => {
  const [rows, columns] = stream.grid, [width, height] = stream.size, maskHeight = 160, maskWidth = Math.max(1, Math.round(maskHeight * width / height));
  const objects = stream.objects.filter(({ step }) => onlyStep === null || step === onlyStep), modes = objects.length ? DISPLAY_MODES : DISPLAY_MODES.slice(0, 3);
  const getSliderValue = () => state.sliderValues[state.mode] ?? (DISPLAY_MODES[state.mode] !== "Mask" ? DEFAULT_OPACITY : isMissing(scale.cutoff) ? 50 : Math.max(0, Math.min(100, Math.round(100 * scale.cutoff / scale.vmax))));
  const heatCanvas = h("canvas", { class: "ch-heat-map", role: "img", "aria-label": describeHeatMap(scale, stream) });
  const patchFrame = h("i", { class: "ch-patch-frame", hidden: true, "aria-hidden": "true" });
  const stack = h("div", { class: "ch-image-stack", tabindex: 0, role: "group", "aria-label": "Heat map: arrow keys move from patch to patch",
    style: { "aspect-ratio": `${width} / ${height}` } }, image && imageElement(image, ""), heatCanvas, detectionBoxes(boxes, false, onlyStep), objects.length > 0 && detectionBoxes(boxes, true, onlyStep, true), patchFrame);
  const sliderLabel = h("output", { class: "ch-note" });
  const slider = h("input", { type: "range", min: 0, max: 100, class: "ch-slider", input: () => { state.sliderValues[state.mode] = Number(slider.value); draw(); } });
  const draw = () => {
    const mode = DISPLAY_MODES[state.mode], value = getSliderValue();
    slider.value = value;
    slider.setAttribute("aria-label", mode === "Mask" ? "Threshold of the mask" : mode === "Objects" ? "Opacity of the masks" : "Opacity of the heat map");
    stack.classList.toggle("ch-mask", mode === "Mask");
    stack.classList.toggle("ch-object-masks", mode === "Objects");
    heatCanvas.classList.toggle("ch-pixelated", mode === "Patches");
    heatCanvas.style.opacity = mode === "Mask" ? 1 : value / 100;
    if (mode === "Patches") {
      paintPixels(heatCanvas, scale.scores, rows, columns, (score) => getOverlayColour(score, scale.vmax));
    } else if (mode === "Objects") {
      drawMasks(heatCanvas, objects, rows, columns, maskHeight, maskWidth, 110);
    } else {
      const values = interpolate(scale.scores, rows, columns, maskHeight, maskWidth);
      if (mode === "Heat map") paintPixels(heatCanvas, values, maskHeight, maskWidth, (score) => getOverlayColour(score, scale.vmax));
      else paintPixels(heatCanvas, values, maskHeight, maskWidth, (score) => (score >= value / 100 * scale.vmax ? [0, 0, 0, 0] : [250, 250, 250, 225]));
    }
    const fraction = scale.scores.filter((score) => score >= value / 100 * scale.vmax).length / scale.scores.length;
    sliderLabel.textContent = mode === "Mask" ? `above ${formatNumber(value / 100 * scale.vmax, 3)}: ${Math.round(100 * fraction)} % of the patches` : `opacity ${value} %`;
  };
  const showPatch = (row, column, announce) => {
    patchFrame.hidden = false;
    for (const [name, fraction] of Object.entries({ left: column / columns, top: row / rows, width: 1 / columns, height: 1 / rows })) {
      patchFrame.style.setProperty(name, toPercent(fraction));
    }
    showTooltip(stack, getTooltip(row * columns + column), patchFrame.getBoundingClientRect(), announce);
  };
  const clearSelection = () => { patchFrame.hidden = true; hideTooltip(stack); };
  const moveTo = addKeyboardCursor(stack, () => [rows, columns], (row, column) => showPatch(row, column, true), clearSelection);
  stack.addEventListener("pointermove", (event) => {
    const box = stack.getBoundingClientRect();
    const row = Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows));
    const column = Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns));
    if (row < 0 || column < 0) return;
    showPatch(row, column);
    moveTo(row, column);
  });
  stack.addEventListener("pointerleave", clearSelection);
  draw();
  return h("figure", { class: "ch-overlay" }, stack, h("figcaption", null,
    segmentedControl("Display of the scores", modes, state.mode, (mode) => { state.mode = mode; draw(); }), h("span", { class: "ch-slider-row" }, slider, sliderLabel)));
};

const describeHeatMap = (scale, stream) => {
  let strongest = 0;
  scale.scores.forEach((score, index) => { if (Math.abs(score ?? 0) > Math.abs(scale.scores[strongest] ?? 0)) strongest = index; });
  return `Heat map; strongest patch: row ${Math.floor(strongest / stream.grid[1])}, column ${strongest % stream.grid[1]}: ${formatNumber(scale.scores[strongest], 3)}`;
};

// A small heat map over the image for each row of scores; for detected objects with box and mask.
export const smallHeatMaps = (stream, rows, vmax, image, boxes, names, onSelect, cutoffs) => h("div", { class: `ch-small-maps${cutoffs ? " ch-large-maps" : ""}` }, rows.map((scores, row) => {
  const [width, height] = stream.size, heatCanvas = h("canvas", { class: "ch-heat-map ch-pixelated", "aria-hidden": "true" });
  paintPixels(heatCanvas, scores, ...stream.grid, (score) => getOverlayColour(score, vmax));
  const maskCanvas = cutoffs && h("canvas", { class: "ch-heat-map", "aria-hidden": "true" }), maskHeight = 120, maskWidth = Math.max(1, Math.round(maskHeight * width / height));
  const [fraction] = maskCanvas ? drawMasks(maskCanvas, [{ step: row, scores, cutoff: cutoffs[row] }], ...stream.grid, maskHeight, maskWidth, 0) : [];
  const stack = h("div", { class: "ch-image-stack", style: { "aspect-ratio": `${width} / ${height}` } }, image && imageElement(image, "", true), heatCanvas, maskCanvas, detectionBoxes(boxes, false, row, Boolean(cutoffs)));
  const caption = h("figcaption", null, h("bdi", null, names[row]), cutoffs && h("span", null, isMissing(cutoffs[row]) ? ", no mask" : `, mask of ${Math.round(100 * fraction)} %`));
  if (!onSelect) return h("figure", null, stack, caption);
  return h("button", { type: "button", class: "ch-map-button", click: () => onSelect(row) }, stack, caption);
}));

// Regions as boxes over the image; the strongest are on top, and strong ones have their names.
export const regionBoxes = (stream, scale, image, getTooltip, onHover) => {
  const elements = [];
  stream.boxes.forEach((box, unit) => {
    if (!box) return;
    const strength = Math.abs(toColourLevel(scale.scores[unit] ?? 0, scale.vmax)) / LEVELS;
    const region = h("i", { class: "ch-region", "data-unit": unit, style: { ...boxStyle(box), "--strength": Math.max(0.15, strength), "z-index": Math.round(100 * strength) } },
      strength > 0.5 && h("b", null, scale.labels[unit]));
    region.addEventListener("pointerenter", () => { showTooltip(region, getTooltip(unit), region.getBoundingClientRect()); onHover?.(unit); });
    region.addEventListener("pointerleave", () => { hideTooltip(region); onHover?.(null); });
    elements[unit] = applyColour(region, scale.scores[unit], scale.vmax);
  });
  const stack = h("div", { class: "ch-image-stack", tabindex: 0, role: "group", "aria-label": "Regions: arrow keys move between regions" },
    imageElement(image, "", true), elements);
  addKeyboardCursor(stack, () => [1, stream.boxes.length], (_, unit) => { if (elements[unit]) showTooltip(stack, getTooltip(unit), elements[unit].getBoundingClientRect(), true); }, () => hideTooltip(stack));
  return h("figure", { class: "ch-regions" }, stack, h("figcaption", null, "Regions, the strongest on top"));
};
