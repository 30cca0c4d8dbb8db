// The one renderer: a document in, a view drawn. Notebooks, single files, reports and the page all come through here.
import { h } from "./dom.js";
import { redraw } from "./colour.js";
import { input } from "./card.js";
import { attention } from "./attention.js";
import { aggregate, curves, intervals, probe, table } from "./figures.js";

const VERSION = 1;

const page = ({ eyebrow, title, foot, parts }, options) => h("div", null,
  h("p", { class: "ch-eyebrow" }, eyebrow),
  h("h1", null, title),
  parts.map((part) => view(part, { ...options, head: parts.length > 1 || part.heading !== title })),
  foot && h("p", { class: "ch-foot" }, foot));

const panel = (make) => (document_) => h("div", { class: "ch-panel" }, make(document_));
const VIEWS = { page, input, attention, aggregate, probe, curves: panel(curves), intervals: panel(intervals), table: panel(table) };

const view = (document_, options) => {
  if (document_.version > VERSION) return h("p", { class: "ch-warn" }, "This was made by a newer clearhead than the one that draws it.");
  const make = VIEWS[document_.view];
  return make ? make(document_, options) : h("p", { class: "ch-warn" }, `There is no view “${document_.view}”.`);
};

// Draws a document into an element, in place of what was there. options: tile, onLabel, head; see renderer notes.
export const draw = (element, document_, options = {}) => {
  if (!element.closest(".clearhead")) element.classList.add("clearhead");
  element.replaceChildren(view(document_, options));
};

// What is folded away is opened for printing.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll(".clearhead details:not([open])")];
  for (const part of opened) { part.fill?.(); part.open = true; }
  redraw();
});
addEventListener("afterprint", () => opened.forEach((part) => { part.open = false; }));

// Draws every document that stands in the page as data, in place of its plain form.
export const start = () => {
  for (const data of document.querySelectorAll("script.ch-data")) {
    const home = data.parentElement;
    if (home.dataset.drawn) continue;
    home.dataset.drawn = "yes";
    home.querySelector(".ch-plain")?.remove();
    const place = h("div");
    home.append(place);
    draw(place, JSON.parse(data.textContent));
  }
};
