// Scores over a picture: a smooth heat map or its patches with an opacity, a mask above a threshold; boxes of regions and
// of what was found. The picture is the light table's, whatever the page, because a photograph has no dark side.
import { h, choice } from "./dom.js";
import { isMissing, number } from "./format.js";
import { glaze, level, paint, shade } from "./colour.js";
import { LEVELS } from "./palette.js";
import { cursor, hush, tell } from "./tip.js";

const percent = (share) => `${(100 * Math.max(0, Math.min(1, share))).toFixed(2)}%`;
export const place = ([left, top, right, bottom]) => {
  const inside = (edge) => Math.max(0, Math.min(1, edge));
  return { left: percent(left), top: percent(top), width: percent(inside(right) - inside(left)), height: percent(inside(bottom) - inside(top)) };
};

export const image = (picture, alt, grey) => h("img", { src: picture.src, alt, width: picture.width, height: picture.height,
  class: `${picture.small ? "ch-pixels" : ""}${grey ? " ch-grey" : ""}` });

// The boxes of what was found; `only` one step, or all of them; each in its `own` colour with its name, if asked for.
// A name stands above its box, or inside where there is no room above, and begins at the right edge near that of the picture.
export const found = (boxes, named, only = null, own = false) => boxes.filter(({ step }) => only === null || step === only).map(({ step, label, box }) => {
  const colour = own && inkOf(step), where = `${box[1] < 0.09 ? " ch-inside" : ""}${box[0] > 0.7 ? " ch-ending" : ""}`;
  return h("i", { class: `ch-box${own ? " ch-own" : ""}${where}`, style: { ...place(box), ...(own && { "border-color": colour }) }, title: label },
    named && h("b", { style: own ? { background: colour } : {} }, label));
});
const inkOf = (step) => shade(step, 0.56); // dark enough for white letters

export const seen = (picture, boxes) => h("figure", { class: "ch-picture" },
  h("div", { class: "ch-stack" }, image(picture, "The image after preprocessing"), found(boxes, true)),
  h("figcaption", { class: "ch-note" }, "Model input"));

// Bilinear, with the centres of patches where they lie; what has no score is left out of its neighbours' mean.
const smooth = (values, rows, columns, height, width) => {
  const made = new Float32Array(height * width);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const row = (y + 0.5) * rows / height - 0.5, column = (x + 0.5) * columns / width - 0.5;
    const top = Math.floor(row), left = Math.floor(column);
    let sum = 0, weight = 0;
    for (const [down, across] of [[0, 0], [0, 1], [1, 0], [1, 1]]) {
      const r = Math.max(0, Math.min(rows - 1, top + down)), c = Math.max(0, Math.min(columns - 1, left + across));
      const share = (down ? row - top : 1 - row + top) * (across ? column - left : 1 - column + left), value = values[r * columns + c];
      if (!isMissing(value)) { sum += share * value; weight += share; }
    }
    made[y * width + x] = weight >= 0.5 ? sum / weight : NaN;
  }
  return made;
};

// A mask in one colour: its inside veiled, its edge firm. Gives how many pixels it has.
const veil = (context, values, cut, height, width, colour, inner) => {
  const one = h("canvas", { width, height }), own = one.getContext("2d"), made = own.createImageData(width, height);
  const inside = (y, x) => y >= 0 && x >= 0 && y < height && x < width && values[y * width + x] >= cut;
  let filled = 0;
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) if (inside(y, x)) {
    const amid = inside(y - 1, x) && inside(y + 1, x) && inside(y, x - 1) && inside(y, x + 1);
    made.data[4 * (y * width + x) + 3] = amid ? inner : 255;
    filled++;
  }
  own.putImageData(made, 0, 0);
  own.globalCompositeOperation = "source-in";
  own.fillStyle = colour;
  own.fillRect(0, 0, width, height);
  context.drawImage(one, 0, 0);
  return filled;
};

// Every object in a colour of its own: its scores, cut as Explanation.mask cuts them; gives the share of pixels in each.
// objects: { step, scores, cut }
const veils = (canvas, objects, rows, columns, height, width, inner) => {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  return objects.map(({ step, scores, cut }) => (isMissing(cut) ? 0 :
    veil(context, smooth(scores, rows, columns, height, width), cut, height, width, inkOf(step), inner) / (height * width)));
};

// Paints one pixel for each value; colour(value): red, green, blue, opacity.
const fill = (canvas, values, rows, columns, colour) => {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), made = context.createImageData(columns, rows);
  values.forEach((value, at) => made.data.set(colour(value), at * 4));
  context.putImageData(made, 0, 0);
};

const WAYS = ["Heat map", "Patches", "Mask", "Objects"], OPACITY = 85;

// stream: grid, size, objects (of a detector: step, scores, cut); scale: scores of the patches in their order, full, cut
// told(patch): the lines to say
export const overlay = (stream, scale, picture, boxes, state, told, only) => {
  const [rows, columns] = stream.grid, [width, height] = stream.size, tall = 160, wide = Math.max(1, Math.round(tall * width / height));
  const objects = stream.objects.filter(({ step }) => only === null || step === only), ways = objects.length ? WAYS : WAYS.slice(0, 3);
  const chosen = () => state.sliders[state.way] ?? (WAYS[state.way] !== "Mask" ? OPACITY : isMissing(scale.cut) ? 50 : Math.max(0, Math.min(100, Math.round(100 * scale.cut / scale.full))));
  const heat = h("canvas", { class: "ch-heat", role: "img", "aria-label": said(scale, stream) });
  const frame = h("i", { class: "ch-patch", hidden: true, "aria-hidden": "true" });
  const stack = h("div", { class: "ch-stack", tabindex: 0, role: "group", "aria-label": "Heat map: arrow keys move from patch to patch",
    style: { "aspect-ratio": `${width} / ${height}` } }, picture && image(picture, ""), heat, found(boxes, false, only), objects.length > 0 && found(boxes, true, only, true), frame);
  const shown = h("output", { class: "ch-note" });
  const slider = h("input", { type: "range", min: 0, max: 100, class: "ch-opacity", input: () => { state.sliders[state.way] = Number(slider.value); draw(); } });
  const draw = () => {
    const way = WAYS[state.way], value = chosen();
    slider.value = value;
    slider.setAttribute("aria-label", way === "Mask" ? "Threshold of the mask" : way === "Objects" ? "Opacity of the masks" : "Opacity of the heat map");
    stack.classList.toggle("ch-masked", way === "Mask");
    stack.classList.toggle("ch-objects", way === "Objects");
    heat.classList.toggle("ch-pixels", way === "Patches");
    heat.style.opacity = way === "Mask" ? 1 : value / 100;
    if (way === "Patches") {
      fill(heat, scale.scores, rows, columns, (score) => glaze(score, scale.full));
    } else if (way === "Objects") {
      veils(heat, objects, rows, columns, tall, wide, 110);
    } else {
      const values = smooth(scale.scores, rows, columns, tall, wide);
      if (way === "Heat map") fill(heat, values, tall, wide, (score) => glaze(score, scale.full));
      else fill(heat, values, tall, wide, (score) => (score >= value / 100 * scale.full ? [0, 0, 0, 0] : [250, 250, 250, 225]));
    }
    const share = scale.scores.filter((score) => score >= value / 100 * scale.full).length / scale.scores.length;
    shown.textContent = way === "Mask" ? `above ${number(value / 100 * scale.full, 3)}: ${Math.round(100 * share)} % of the patches` : `opacity ${value} %`;
  };
  const show = (row, column, aloud) => {
    frame.hidden = false;
    for (const [name, share] of Object.entries({ left: column / columns, top: row / rows, width: 1 / columns, height: 1 / rows })) {
      frame.style.setProperty(name, percent(share));
    }
    tell(stack, told(row * columns + column), frame.getBoundingClientRect(), aloud);
  };
  const leave = () => { frame.hidden = true; hush(stack); };
  const moveTo = cursor(stack, () => [rows, columns], (row, column) => show(row, column, true), leave);
  stack.addEventListener("pointermove", (event) => {
    const box = stack.getBoundingClientRect();
    const row = Math.min(rows - 1, Math.floor((event.clientY - box.top) / box.height * rows));
    const column = Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns));
    if (row < 0 || column < 0) return;
    show(row, column);
    moveTo(row, column);
  });
  stack.addEventListener("pointerleave", leave);
  draw();
  return h("figure", { class: "ch-overlay" }, stack, h("figcaption", null,
    choice("Display of the scores", ways, state.way, (way) => { state.way = way; draw(); }), h("span", { class: "ch-slide" }, slider, shown)));
};

const said = (scale, stream) => {
  let best = 0;
  scale.scores.forEach((score, at) => { if (Math.abs(score ?? 0) > Math.abs(scale.scores[best] ?? 0)) best = at; });
  return `Heat map; strongest patch: row ${Math.floor(best / stream.grid[1])}, column ${best % stream.grid[1]}: ${number(scale.scores[best], 3)}`;
};

// A small map for each row of scores, the picture below each of them; where objects were found, the box and the mask of each.
export const smallMaps = (stream, rows, full, picture, boxes, names, choose, cuts) => h("div", { class: `ch-small${cuts ? " ch-large" : ""}` }, rows.map((scores, row) => {
  const [width, height] = stream.size, heat = h("canvas", { class: "ch-heat ch-pixels", "aria-hidden": "true" });
  fill(heat, scores, ...stream.grid, (score) => glaze(score, full));
  const edge = cuts && h("canvas", { class: "ch-heat", "aria-hidden": "true" }), tall = 120, wide = Math.max(1, Math.round(tall * width / height));
  const [inside] = edge ? veils(edge, [{ step: row, scores, cut: cuts[row] }], ...stream.grid, tall, wide, 0) : [];
  const stack = h("div", { class: "ch-stack", style: { "aspect-ratio": `${width} / ${height}` } }, picture && image(picture, "", true), heat, edge, found(boxes, false, row, Boolean(cuts)));
  const caption = h("figcaption", null, h("bdi", null, names[row]), cuts && h("span", null, isMissing(cuts[row]) ? ", no mask" : `, mask of ${Math.round(100 * inside)} %`));
  if (!choose) return h("figure", null, stack, caption);
  return h("button", { type: "button", class: "ch-map", click: () => choose(row) }, stack, caption);
}));

// Regions as boxes over the picture; the strongest lie on top, and those that stand out say their names.
export const regions = (stream, scale, picture, told, point) => {
  const made = [];
  stream.boxes.forEach((box, unit) => {
    if (!box) return;
    const strength = Math.abs(level(scale.scores[unit] ?? 0, scale.full)) / LEVELS;
    const region = h("i", { class: "ch-region", "data-unit": unit, style: { ...place(box), "--s": Math.max(0.15, strength), "z-index": Math.round(100 * strength) } },
      strength > 0.5 && h("b", null, scale.labels[unit]));
    region.addEventListener("pointerenter", () => { tell(region, told(unit), region.getBoundingClientRect()); point?.(unit); });
    region.addEventListener("pointerleave", () => { hush(region); point?.(null); });
    made[unit] = paint(region, scale.scores[unit], scale.full);
  });
  const stack = h("div", { class: "ch-stack", tabindex: 0, role: "group", "aria-label": "Regions: arrow keys move between regions" },
    image(picture, "", true), made);
  cursor(stack, () => [1, stream.boxes.length], (_, unit) => { if (made[unit]) tell(stack, told(unit), made[unit].getBoundingClientRect(), true); }, () => hush(stack));
  return h("figure", { class: "ch-regions" }, stack, h("figcaption", null, "Regions, the strongest on top"));
};
