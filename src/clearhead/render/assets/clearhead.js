// Entry point of the renderer: draws a view model. Notebooks, single files, reports and the web page all use it.
import { h, collapsible } from "./dom.js";
import { redrawCanvases } from "./colour.js";
import { inputView } from "./input_view.js";
import { attentionView, multiStreamAttentionView } from "./attention.js";
import { aggregateView, intervalTable, rankingTable, dataTable } from "./tables.js";
import { CHARTS, probeView } from "./charts.js";

const VERSION = 2;

const page = ({ eyebrow, title, footer, children }, options) => h("div", null,
  h("p", { class: "ch-eyebrow" }, eyebrow),
  h("h1", null, title),
  children.map((child) => renderView(child, { ...options, showHeading: children.length > 1 || child.heading !== title })),
  footer && h("p", { class: "ch-footer" }, footer));

// Views under one heading; details are collapsed.
const section = ({ heading, note, children, collapsed_children: collapsedChildren }, options) => h("section", { class: "ch-input" },
  options.showHeading !== false && h("h2", null, heading),
  note && h("p", { class: "ch-note" }, note),
  children.map((child) => renderView(child, {})),
  collapsedChildren.length > 0 && h("div", { class: "ch-panel" }, collapsedChildren.map((child) => collapsible(child.title, () => (PANEL_RENDERERS[child.view] ?? RENDERERS[child.view])(child, { showHeading: false })))));

const PANEL_RENDERERS = { ...CHARTS, intervals: intervalTable, table: dataTable, ranking: rankingTable };
const panel = ({ title, note, children }) => h("div", { class: "ch-panel" }, title && h("h3", null, title), note && h("p", { class: "ch-note" }, note),
  h("div", { class: `ch-charts${children.every(({ small }) => small) ? " ch-small-charts" : ""}` }, children.map((child) => PANEL_RENDERERS[child.view](child))));
const inPanel = (render) => (viewModel) => h("div", { class: "ch-panel" }, !Object.values(CHARTS).includes(render) && viewModel.title && h("h3", null, viewModel.title), render(viewModel));
const RENDERERS = { page, section, panel, input: inputView, attention: attentionView, multi_stream_attention: multiStreamAttentionView, aggregate: aggregateView, probe: probeView,
  ...Object.fromEntries(Object.entries(PANEL_RENDERERS).map(([name, render]) => [name, inPanel(render)])) };

const renderView = (viewModel, options) => {
  if (viewModel.version !== VERSION) {
    const age = viewModel.version > VERSION ? "a newer" : "an older";
    return h("p", { class: "ch-warning" }, `This document was made by ${age} version of clearhead than the one that displays it.`);
  }
  const render = RENDERERS[viewModel.view];
  return render ? render(viewModel, options) : h("p", { class: "ch-warning" }, `There is no view “${viewModel.view}”.`);
};

// Draws a view model into an element and replaces its content. options: fetchHeadMap, onLabel, showHeading.
export const draw = (element, viewModel, options = {}) => {
  if (!element.closest(".clearhead")) element.classList.add("clearhead");
  element.replaceChildren(renderView(viewModel, options));
};

// Collapsed sections are opened for printing, except lists that would fill pages.
let openedDetails = [];
addEventListener("beforeprint", () => {
  openedDetails = [...document.querySelectorAll(".clearhead details:not([open], .ch-long-list)")];
  for (const details of openedDetails) { details.fill?.(); details.open = true; }
  redrawCanvases();
});
addEventListener("afterprint", () => openedDetails.forEach((details) => { details.open = false; }));

// Draws every view model embedded in the page, in place of its static tables.
export const start = () => {
  for (const data of document.querySelectorAll("script.ch-data")) {
    const container = data.parentElement;
    const rendererByModule = { charts: probeView, attention: attentionView };
    if (container.dataset.drawn || data.dataset.modules?.split(" ").some((name) => !rendererByModule[name])) continue; // another cell of the notebook has the script that draws it
    container.dataset.drawn = "yes";
    container.querySelector(".ch-static")?.remove();
    const target = h("div");
    container.append(target);
    draw(target, JSON.parse(data.textContent));
  }
};
