// Scores as colours: orange speaks for the target, blue against it, zero is the paper. The table is colours.py's.
import { LEVELS, LIGHT, DARK, INK_ON_LIGHT, INK_ON_DARK } from "./palette.js";
import { isMissing } from "./format.js";

const BOTH = CSS.supports("color", "light-dark(#000, #fff)");
const SCREEN = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

export const level = (value, full) => {
  if (isMissing(value)) return LEVELS + 1;
  return Math.round(Math.max(-1, Math.min(1, value / full)) * LEVELS);
};

// Background and ink of an element; a bar shows the sign alone.
export const paint = (element, value, full) => painted(element, level(value, full));
export const paintSign = (element, value) => painted(element, Math.sign(value) * LEVELS * 0.75);

// One colour for each theme, as a style takes it.
export const themed = (light, dark) => (BOTH ? `light-dark(${light}, ${dark})` : light);

// Hues that differ in lightness, too, so that nobody has to tell them apart by hue alone: lightness, chroma, hue.
export const INKS = [[0, 0.15, 50], [-0.14, 0.14, 255], [0.05, 0.12, 165], [-0.2, 0.14, 330], [0.04, 0.1, 225], [-0.08, 0.16, 20], [0.02, 0.11, 110], [-0.16, 0.1, 290]];
export const shade = (place, middle) => {
  const [light, chroma, hue] = INKS[place % INKS.length];
  return `oklch(${(middle + light).toFixed(2)} ${chroma} ${hue})`;
};

const painted = (element, step) => {
  const place = step + LEVELS;
  element.style.setProperty("--c", themed(LIGHT[place], DARK[place]));
  element.style.setProperty("--i", themed(INK_ON_LIGHT[place], INK_ON_DARK[place]));
  element.classList.toggle("ch-none", step > LEVELS);
  return element;
};

export const isDark = (element) => {
  const scheme = getComputedStyle(element).colorScheme;
  if (printing || !BOTH || scheme === "light") return false;
  return scheme === "dark" || SCREEN.matches;
};

const bytes = (table) => table.map((hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16)));
const TABLES = { light: bytes(LIGHT), dark: bytes(DARK) };

// The colours of all levels as whole pixels, from the strongest against to "no score".
const pixelsOf = (table) => new Uint32Array(Uint8Array.from(table.flatMap((colour) => [...colour, 255])).buffer);
const PIXELS = { light: pixelsOf(TABLES.light), dark: pixelsOf(TABLES.dark) };
export const pixels = (dark) => PIXELS[dark ? "dark" : "light"];

// A glaze to lay over a picture: the nearer to zero, the more transparent; always of the light table, as pictures are.
export const glaze = (value, full) => {
  if (isMissing(value)) return [...TABLES.light[2 * LEVELS + 1], 230];
  const share = Math.max(-1, Math.min(1, value / full));
  const strong = Math.round(Math.sign(share) * Math.max(Math.abs(share), 0.85) * LEVELS);
  return [...TABLES.light[strong + LEVELS], Math.round(255 * Math.abs(share) ** 0.8)];
};

// A colour of the style sheet, as a canvas needs it.
export const styled = (element, name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

// Canvases have no style sheet: they are drawn again when the colours of the page change, and for paper.
const canvases = new Set();
export const redraw = () => {
  for (const one of canvases) {
    if (one.element.isConnected) one.draw();
    else canvases.delete(one);
  }
};
export const whenColoursChange = (element, draw) => canvases.add({ element, draw });
SCREEN.addEventListener("change", redraw);
addEventListener("beforeprint", () => { printing = true; redraw(); });
addEventListener("afterprint", () => { printing = false; redraw(); });
