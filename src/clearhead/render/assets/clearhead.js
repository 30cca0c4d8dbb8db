// The one renderer: a document in, a view drawn. Notebooks, single files, reports and the page all come through here.
import { h, folded } from "./dom.js";
import { redraw } from "./colour.js";
import { input } from "./card.js";
import { attention, streams } from "./attention.js";
import { aggregate, intervals, ranking, table } from "./figures.js";
import { PLOTS, probe } from "./plots.js";

const VERSION = 1;

const page = ({ eyebrow, title, foot, parts }, options) => h("div", null,
  h("p", { class: "ch-eyebrow" }, eyebrow),
  h("h1", null, title),
  parts.map((part) => view(part, { ...options, head: parts.length > 1 || part.heading !== title })),
  foot && h("p", { class: "ch-foot" }, foot));

// Parts under one heading; what few will look for is folded away.
const section = ({ heading, note, parts, more }, options) => h("section", { class: "ch-input" },
  options.head !== false && h("h2", null, heading),
  note && h("p", { class: "ch-note" }, note),
  parts.map((part) => view(part, {})),
  more.length > 0 && h("div", { class: "ch-panel" }, more.map((part) => folded(part.title, () => (FIGURES[part.view] ?? VIEWS[part.view])(part, { head: false })))));

const FIGURES = { ...PLOTS, intervals, table, ranking };
const panel = ({ title, note, parts }) => h("div", { class: "ch-panel" }, title && h("h3", null, title), note && h("p", { class: "ch-note" }, note),
  h("div", { class: `ch-plots${parts.every(({ small }) => small) ? " ch-smalls" : ""}` }, parts.map((part) => FIGURES[part.view](part))));
const alone = (make) => (document_) => h("div", { class: "ch-panel" }, !Object.values(PLOTS).includes(make) && document_.title && h("h3", null, document_.title), make(document_));
const VIEWS = { page, section, panel, input, attention, streams, aggregate, probe,
  ...Object.fromEntries(Object.entries(FIGURES).map(([name, make]) => [name, alone(make)])) };

const view = (document_, options) => {
  if (document_.version > VERSION) return h("p", { class: "ch-warn" }, "This document was made by a newer version of clearhead than the one that displays it.");
  const make = VIEWS[document_.view];
  return make ? make(document_, options) : h("p", { class: "ch-warn" }, `There is no view “${document_.view}”.`);
};

// Draws a document into an element, in place of what was there. options: tile, onLabel, head; see renderer notes.
export const draw = (element, document_, options = {}) => {
  if (!element.closest(".clearhead")) element.classList.add("clearhead");
  element.replaceChildren(view(document_, options));
};

// What is folded away is opened for printing, but for lists that would fill pages.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll(".clearhead details:not([open], .ch-long)")];
  for (const part of opened) { part.fill?.(); part.open = true; }
  redraw();
});
addEventListener("afterprint", () => opened.forEach((part) => { part.open = false; }));

// Draws every document that stands in the page as data, in place of its plain form.
export const start = () => {
  for (const data of document.querySelectorAll("script.ch-data")) {
    const home = data.parentElement;
    const drawable = { plots: probe, attention };
    if (home.dataset.drawn || data.dataset.needs?.split(" ").some((name) => !drawable[name])) continue; // of another cell, which brings what draws it
    home.dataset.drawn = "yes";
    home.querySelector(".ch-plain")?.remove();
    const place = h("div");
    home.append(place);
    draw(place, JSON.parse(data.textContent));
  }
};
