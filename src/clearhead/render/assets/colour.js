// Scores as colours: orange for the target, blue against it, zero in the background colour. The table is that of colours.py.
import { LEVELS, LIGHT, DARK, INK_ON_LIGHT, INK_ON_DARK } from "./palette.js";
import { isMissing } from "./format.js";

const HAS_LIGHT_DARK = CSS.supports("color", "light-dark(#000, #fff)");
const darkThemeQuery = matchMedia("(prefers-color-scheme: dark)");
let isPrinting = false;

export const toColourLevel = (value, vmax) => {
  if (isMissing(value)) return LEVELS + 1;
  return Math.round(Math.max(-1, Math.min(1, value / vmax)) * LEVELS);
};

// Background and text colour of an element; applySignColour shows only the sign.
export const applyColour = (element, value, vmax) => applyLevel(element, toColourLevel(value, vmax));
export const applySignColour = (element, value) => applyLevel(element, Math.sign(value) * LEVELS * 0.75);

// A CSS colour for the light and the dark theme.
export const makeThemeColour = (light, dark) => (HAS_LIGHT_DARK ? `light-dark(${light}, ${dark})` : light);

// Hues that also differ in lightness, so that they can be distinguished without hue: lightness, chroma, hue.
export const SERIES_HUES = [[0, 0.15, 50], [-0.14, 0.14, 255], [0.05, 0.12, 165], [-0.2, 0.14, 330], [0.04, 0.1, 225], [-0.08, 0.16, 20], [0.02, 0.11, 110], [-0.16, 0.1, 290]];
export const getSeriesColour = (index, lightness) => {
  const [lightnessOffset, chroma, hue] = SERIES_HUES[index % SERIES_HUES.length];
  return `oklch(${(lightness + lightnessOffset).toFixed(2)} ${chroma} ${hue})`;
};

const applyLevel = (element, level) => {
  const index = level + LEVELS;
  element.style.setProperty("--colour", makeThemeColour(LIGHT[index], DARK[index]));
  element.style.setProperty("--text-colour", makeThemeColour(INK_ON_LIGHT[index], INK_ON_DARK[index]));
  element.classList.toggle("ch-no-score", level > LEVELS);
  return element;
};

export const isDarkTheme = (element) => {
  const colourScheme = getComputedStyle(element).colorScheme;
  if (isPrinting || !HAS_LIGHT_DARK || colourScheme === "light") return false;
  return colourScheme === "dark" || darkThemeQuery.matches;
};

const parseHexColours = (table) => table.map((hex) => [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16)));
const RGB_TABLES = { light: parseHexColours(LIGHT), dark: parseHexColours(DARK) };

// The colours of all levels as RGBA pixels, from the most negative to "no score".
const packPixels = (table) => new Uint32Array(Uint8Array.from(table.flatMap((colour) => [...colour, 255])).buffer);
const PIXEL_TABLES = { light: packPixels(RGB_TABLES.light), dark: packPixels(RGB_TABLES.dark) };
export const getPixelTable = (isDark) => PIXEL_TABLES[isDark ? "dark" : "light"];

// The colour of a score over an image: more transparent near zero; always of the light theme, because
// images have no dark one.
export const getOverlayColour = (value, vmax) => {
  if (isMissing(value)) return [...RGB_TABLES.light[2 * LEVELS + 1], 230];
  const fraction = Math.max(-1, Math.min(1, value / vmax));
  const level = Math.round(Math.sign(fraction) * Math.max(Math.abs(fraction), 0.85) * LEVELS);
  return [...RGB_TABLES.light[level + LEVELS], Math.round(255 * Math.abs(fraction) ** 0.8)];
};

// The value of a CSS variable as a colour for canvases.
export const resolveColour = (element, variable) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${variable})`;
  element.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
};

// Canvases have no style sheet: they are redrawn when the theme changes, and for printing.
const canvases = new Set();
export const redrawCanvases = () => {
  for (const canvas of canvases) {
    if (canvas.element.isConnected) canvas.draw();
    else canvases.delete(canvas);
  }
};
export const redrawOnThemeChange = (element, draw) => canvases.add({ element, draw });
darkThemeQuery.addEventListener("change", redrawCanvases);
addEventListener("beforeprint", () => { isPrinting = true; redrawCanvases(); });
addEventListener("afterprint", () => { isPrinting = false; redrawCanvases(); });
