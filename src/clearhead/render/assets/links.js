// Two columns with lines between them, the stronger, the thicker: a head's units, or the words and regions of a picture.
import { h, choice, unpacked } from "./dom.js";
import { number, short } from "./format.js";
import { styled, whenColoursChange } from "./colour.js";
import { image, place } from "./picture.js";
import { cursor, hush, tell } from "./tip.js";

const WIDE = 180;

// every: [left, right, weight from 0 to 1]; alone(side, unit): all links of one unit, where `every` has not all of them
// names and verbs: of the two columns; point(side, unit or null): others may follow
export const links = ({ left, right, every, alone, names, verbs, point }) => {
  const sides = [left, right], most = Math.max(left.length, right.length), step = most <= 40 ? 22 : 15, HIGH = most * step;
  const canvas = h("canvas", { class: "ch-canvas", "aria-hidden": "true" });
  const of = (side, unit) => alone?.(side, unit) ?? every.filter((link) => link[side] === unit);
  let own = null;
  const draw = () => {
    const scale = Math.min(Math.max(1, devicePixelRatio), 15000 / HIGH), context = canvas.getContext("2d");
    canvas.width = WIDE * scale;
    canvas.height = HIGH * scale;
    canvas.style.width = `${WIDE}px`;
    canvas.style.height = `${HIGH}px`;
    context.scale(scale, scale);
    context.strokeStyle = styled(canvas.parentElement, "--link");
    // As strong as it is beside the strongest that is shown: attention over many units is thin everywhere.
    const shown = own ? of(...own) : every, top = shown.reduce((most, link) => Math.max(most, link[2]), 1e-9);
    for (const [from, to, weight] of shown) {
      const share = (weight / top) ** 1.5;
      if (share < 0.02) continue;
      context.globalAlpha = share;
      context.lineWidth = 0.6 + 2.4 * share;
      context.beginPath();
      context.moveTo(0, (from + 0.5) * step);
      context.bezierCurveTo(WIDE / 2, (from + 0.5) * step, WIDE / 2, (to + 0.5) * step, WIDE, (to + 0.5) * step);
      context.stroke();
    }
  };
  const told = (side, unit) => [[`${sides[side][unit]} ${verbs[side]}`, ""],
    ...of(side, unit).sort((a, b) => b[2] - a[2]).slice(0, 5).map((link) => [sides[1 - side][link[1 - side]], number(link[2], 2)])];
  const columns = [];
  const column = (side) => {
    const items = sides[side].map((name, unit) => h("li", { "data-unit": unit, style: { height: `${step}px` } }, h("bdi", null, short(name, 16))));
    const list = h("ol", { class: "ch-ends", tabindex: 0, "aria-label": names[side] }, items);
    const show = (unit, aloud) => {
      own = [side, unit];
      items.forEach((item, place) => item.classList.toggle("ch-on", place === unit));
      draw();
      tell(list, told(side, unit), items[unit].getBoundingClientRect(), aloud);
      if (aloud) items[unit].scrollIntoView({ block: "nearest" });
      point?.(side, unit);
    };
    const leave = () => {
      own = null;
      items.forEach((item) => item.classList.remove("ch-on"));
      draw();
      hush(list);
      point?.(side, null);
    };
    const moveTo = cursor(list, () => [1, items.length], (_, unit) => show(unit, true), leave);
    list.addEventListener("pointerover", (event) => {
      const unit = event.target.closest("li")?.dataset.unit;
      if (unit === undefined) return;
      show(Number(unit));
      moveTo(0, Number(unit));
    });
    list.addEventListener("pointerleave", leave);
    columns[side] = (unit) => {
      if (unit === null) return leave();
      show(unit);
      const own = items[unit]; // brought into sight without moving the page
      frame.scrollTop = Math.max(Math.min(frame.scrollTop, own.offsetTop - frame.offsetTop), own.offsetTop - frame.offsetTop + own.offsetHeight - frame.clientHeight);
    };
    return list;
  };
  const frame = h("div", { class: "ch-scroll ch-links", tabindex: 0, role: "region", "aria-label": `${names[0]} and ${names[1].toLowerCase()}` }, column(0), canvas, column(1));
  const seen = new ResizeObserver(() => { if (canvas.isConnected) { seen.disconnect(); draw(); } });
  seen.observe(frame);
  whenColoursChange(canvas, draw);
  frame.point = (side, unit) => columns[side](unit);
  return frame;
};

// Which units of one stream look at which of another, one way or the other; over the picture, those that the unit under
// the pointer looks at light up, and pointing at one of them shows its links.
export const between = ({ ways, ends }, picture) => {
  const box = h("div");
  const show = (way) => box.replaceChildren(oneWay(ways[way], ends, picture));
  show(0);
  const named = ({ from, to }) => `${ends[from].title} → ${ends[to].title.toLowerCase()}`;
  return h("section", { class: "ch-panel" }, h("h3", null, `${ends[ways[0].from].title} and ${ends[ways[0].to].title.toLowerCase()}`),
    ways.length > 1 && choice("Direction of attention", ways.map(named), 0, show), box);
};

const oneWay = ({ from, to, weights, rows }, ends, picture) => {
  const values = unpacked(weights), [, width] = weights.shape, full = weights.full, sides = [ends[from], ends[to]];
  const every = Array.from(values, (weight, at) => [Math.floor(at / width), at % width, weight]);
  const drawn = sides.findIndex(({ boxes }) => boxes), boxes = sides[drawn]?.boxes;
  const of = (side, unit, other) => (side === 0 ? values[unit * width + other] : values[other * width + unit]) / full;
  const lit = picture && boxes ? boxes.map((box, unit) => box && h("i", { class: "ch-lit", "data-unit": unit, style: place(box),
    pointerenter: () => frame.point(drawn, unit), pointerleave: () => frame.point(drawn, null) })) : [];
  const point = (side, unit) => lit.forEach((one, other) =>
    one?.style.setProperty("--s", unit === null ? 0 : side === drawn ? Number(other === unit) : of(side, unit, other)));
  const frame = links({ left: sides[0].labels, right: sides[1].labels, every, names: sides.map(({ title }) => title), verbs: ["attends to", "is attended to by"], point });
  const over = lit.length > 0 && h("figure", { class: "ch-regions" }, h("div", { class: "ch-stack" }, image(picture, "The image", true), lit));
  return h("div", null, h("p", { class: "ch-note" }, `${rows}; the strongest link is ${number(full, 3)}. Point at a unit to show only its links.`),
    h("div", { class: "ch-beside ch-joined" }, frame, over));
};
