// Everything about one input: the model's input and prediction, a card for each method or target, and their agreement.
import { h, segmentedControl, collapsible, scrollable, decodeArray } from "./dom.js";
import { isMissing, formatNumber } from "./format.js";
import { applyColour } from "./colour.js";
import { scoreBars, allScores, forcePlot, colourLegend, predictionTable, findStrongest } from "./bars.js";
import { streamLinks } from "./links.js";
import { matrix } from "./matrix.js";
import { audioTimeline, scoredText } from "./text.js";
import { heatMapOverlay, regionBoxes, modelInputImage, smallHeatMaps } from "./image.js";

const MAX_PRINTED_SCORES = 100; // longer lists are printed only if they are open
const getStreamExplanation = (card, stream) => card.explanation.by_stream?.[stream.stream] ?? card.explanation;
const computeVmax = (scores, special) => {
  const magnitudes = scores.filter((score, index) => !special[index] && !isMissing(score)).map(Math.abs);
  return Math.max(0, ...magnitudes) || 1;
};

// Rows of an encoded array; the decoded numbers are cached, because they are needed for every redraw.
const decodeRows = (encoded) => {
  encoded.numbers ??= decodeArray(encoded);
  const width = encoded.shape.at(-1), rows = encoded.numbers.length / width;
  return Array.from({ length: rows }, (_, row) => Array.from(encoded.numbers.subarray(row * width, (row + 1) * width)));
};

// The scores of a stream that are shown: of all steps or of one, by token or by word.
const getShownScores = (card, stream, state) => {
  const explanation = getStreamExplanation(card, stream), streamView = card.streams[stream.stream], stepMatrix = streamView.arrays.matrix;
  const showsStep = state.step !== null && stepMatrix?.row_axis === "step";
  const scores = showsStep ? decodeRows(stepMatrix)[state.step] : explanation.scores, vmax = showsStep ? stepMatrix.vmax : streamView.vmax;
  if (!(state.showsWords && stream.word_level)) {
    return { labels: stream.labels, special: explanation.units.special, lines: stream.lines, containingWords: stream.containing_words, evidence: stream.evidence, scores, vmax,
      intervals: showsStep ? undefined : explanation.intervals, intervalLevel: explanation.provenance.interval_level };
  }
  const { labels, special, lines, parents } = stream.word_level, wordScores = labels.map(() => null);
  parents.forEach((word, index) => { if (!isMissing(scores[index])) wordScores[word] = (wordScores[word] ?? 0) + scores[index]; });
  const evidence = stream.evidence && [...new Set(stream.evidence.map((index) => parents[index]))];
  return { labels, special, lines, evidence, scores: wordScores, vmax: computeVmax(wordScores, special) };
};

export const inputView = (viewModel, options = {}) => {
  const { cards, streams, image, detections, notes, agreement, disagreements } = viewModel;
  const isWide = streams.filter((stream) => stream.is_input).length > 1 || cards.some((card) => card.steps);
  const section = h("section", { class: "ch-input" });
  // The unit under the pointer is highlighted in every card.
  const highlightUnit = (stream, unit) => {
    for (const other of section.querySelectorAll(`[data-stream="${CSS.escape(stream.stream)}"] [data-unit]`)) {
      other.classList.toggle("ch-highlighted", unit !== null && other.dataset.unit === String(unit));
    }
  };
  section.append(...[
    options.showHeading !== false && h("h2", null, viewModel.heading),
    h("div", { class: "ch-summary" }, image && modelInputImage(image, detections),
      h("div", null, h("p", { class: "ch-label" }, "Explained"), viewModel.target_descriptions.map((line) => h("p", null, line))),
      predictionTable(viewModel.prediction, options.onLabel)),
    notes.map((note) => h("p", { class: "ch-warning", role: "note" }, note)),
    h("div", { class: `ch-methods${isWide ? " ch-single-column" : ""}` }, cards.map((card) => methodCard(viewModel, card, highlightUnit))),
    viewModel.links && streamLinks(viewModel.links, image),
    agreement.length > 0 && agreementSection(agreement, disagreements ?? []),
  ].flat().filter(Boolean));
  return section;
};

const methodCard = (viewModel, card, highlightUnit) => {
  const state = { step: null, showsWords: false, mode: 0, sliderValues: [] };
  const inputStreams = viewModel.streams.filter((stream) => stream.is_input);
  const elements = inputStreams.map((stream) => h("div", { class: "ch-stream", "data-stream": stream.stream }));
  const render = () => elements.forEach((element, index) => {
    const stream = inputStreams[index];
    element.replaceChildren(...streamElements(viewModel, card, stream, state, highlightUnit, inputStreams.length > 1, selectStep, render).flat().filter(Boolean));
  });
  const stepButtons = card.steps?.map(({ name, title }, step) =>
    h("button", { type: "button", class: "ch-chip", title, "aria-pressed": "false", click: () => selectStep(step) }, h("bdi", null, name)));
  const selectStep = (step) => {
    state.step = state.step === step ? null : step;
    stepButtons?.forEach((button, index) => button.setAttribute("aria-pressed", String(index === state.step)));
    render();
  };
  render();
  return h("article", { class: "ch-card" },
    h("h3", null, card.title),
    card.guidance && h("p", { class: "ch-note" }, card.guidance),
    card.citation && h("p", { class: "ch-note" }, card.citation),
    warningNotes(card.warnings ?? []),
    stepButtons && h("div", null, h("p", { class: "ch-label" }, `${stepButtons.length} ${viewModel.detections.length ? "objects" : "steps"}: select one to show it alone`), h("div", { class: "ch-steps" }, stepButtons)),
    h("div", { class: "ch-streams" }, elements),
    h("div", { class: "ch-details" }, detailSections(viewModel, card, state)));
};

const streamElements = (viewModel, card, stream, state, highlightUnit, hasTitle, selectStep, render) => {
  const scale = getShownScores(card, stream, state), streamView = card.streams[stream.stream], explanation = getStreamExplanation(card, stream);
  const getTooltip = (unit) => makeTooltip(viewModel, card, stream, state, scale, unit);
  const notes = [];
  if (stream.layout === "text" && scale.special.includes(true)) notes.push("underlined: special tokens, outside the scale");
  if (scale.scores.some(isMissing)) notes.push("hatched: no score");
  if (scale.evidence?.length) notes.push("dotted line: marked as evidence");
  const levelControl = stream.word_level && segmentedControl("Units", ["Tokens", "Words"], state.showsWords ? 1 : 0, (index) => { state.showsWords = index === 1; render(); });
  const unitDisplay = scoredUnits(viewModel, stream, scale, streamView, explanation, state, getTooltip, highlightUnit);
  const isOverImage = stream.layout === "grid" || stream.layout === "boxes";
  const legend = colourLegend(scale, streamView.is_signed, notes, isOverImage), strongestBars = scoreBars("Strongest units", scale, findStrongest(scale, stream.layout === "list" ? 12 : 6));
  return [
    hasTitle && h("h4", null, stream.title),
    levelControl,
    isOverImage ? h("div", { class: "ch-columns" }, h("div", null, unitDisplay, legend), strongestBars) : [unitDisplay, legend],
    stepMaps(viewModel, card, stream, state, selectStep),
    !isOverImage && strongestBars,
  ];
};

// The units in their layout; null for a list of units, which the bars show.
const scoredUnits = (viewModel, stream, scale, streamView, explanation, state, getTooltip, highlightUnit) => {
  const { image, detections } = viewModel;
  if (stream.layout === "text") return scoredText(scale, stream.is_verbatim, getTooltip, (unit) => { if (!state.showsWords) highlightUnit(stream, unit); });
  if (stream.layout === "boxes") return regionBoxes({ boxes: explanation.units.boxes }, scale, image, getTooltip, (unit) => highlightUnit(stream, unit));
  if (stream.layout === "time") return audioTimeline(state.step === null ? streamView.audio_segments : scale.scores.map((score, index) => [scale.labels[index], score]), scale.vmax, streamView.is_signed);
  if (stream.layout !== "grid") return null;
  const contentIndices = listContentUnits(explanation), cutoff = state.step === null ? streamView.mask_cutoff : streamView.step_mask_cutoffs?.[state.step], patches = { ...scale, cutoff, scores: contentIndices.map((unit) => scale.scores[unit]) };
  return heatMapOverlay({ grid: explanation.units.grid, size: stream.size, objects: makeObjects(detections, streamView, patches, contentIndices) }, patches, image, detections, state, (patch) => getTooltip(contentIndices[patch]), state.step);
};

// The detected objects, each with its scores of the patches and the score at which its mask begins.
const makeObjects = (detections, streamView, patches, contentIndices) => {
  const rows = streamView.step_mask_cutoffs && decodeRows(streamView.arrays.matrix);
  return detections.map(({ step }) => ({ step, cutoff: streamView.step_mask_cutoffs ? streamView.step_mask_cutoffs[step] : streamView.mask_cutoff, scores: rows ? contentIndices.map((unit) => rows[step][unit]) : patches.scores }));
};

const listContentUnits = (explanation) => explanation.units.special.flatMap((special, index) => (special ? [] : [index]));

// A unit's name and raw score and, if there are several cards, its score in each of them.
const makeTooltip = (viewModel, card, stream, state, scale, unit) => {
  const lines = [[scale.labels[unit], formatNumber(scale.scores[unit], 5)]];
  if (scale.containingWords?.[unit]) lines.push([`in ${scale.containingWords[unit]}`, ""]);
  if (scale.evidence?.includes(unit)) lines.push(["marked as evidence", ""]);
  if (viewModel.cards.length > 1) for (const other of viewModel.cards) {
    if (other !== card) lines.push([other.title, formatNumber(getShownScores(other, stream, { ...state, step: null }).scores[unit], 3)]);
  }
  return lines;
};

const stepMaps = (viewModel, card, stream, state, selectStep) => {
  const stepMatrix = card.streams[stream.stream].arrays.matrix, explanation = getStreamExplanation(card, stream);
  if (stepMatrix?.row_axis !== "step") return null;
  const rows = decodeRows(stepMatrix), caption = h("p", { class: "ch-label" }, `${viewModel.detections.length ? "Object by object" : "Step by step"}; full colour is ${formatNumber(stepMatrix.vmax, 3)}`);
  if (stream.layout === "grid") {
    const contentIndices = listContentUnits(explanation), maps = rows.map((row) => contentIndices.map((unit) => row[unit]));
    return h("div", null, caption, smallHeatMaps({ grid: explanation.units.grid, size: stream.size }, maps, stepMatrix.vmax, viewModel.image, viewModel.detections, stepMatrix.row_names, selectStep, card.streams[stream.stream].step_mask_cutoffs));
  }
  return h("div", null, caption, matrix({ rows: stepMatrix.row_names, columns: stream.labels, values: rows.flat(), vmax: stepMatrix.vmax,
    label: "Step by unit", rowAxis: "step", selectedRow: state.step, onSelectRow: selectStep, maxCellSize: stream.labels.length <= 32 ? 26 : 16 }));
};

// Collapsed sections: all scores, rows, layers, heads, force plot, certificate, and how to reproduce the result.
const detailSections = (viewModel, card, state) => {
  const isMultiStream = viewModel.streams.length > 1, sections = [];
  if (card.force_plot) sections.push(collapsible("From the base value to the output", () =>
    forcePlot(card.force_plot, viewModel.streams.map((stream) => ({ labels: stream.labels, scores: getStreamExplanation(card, stream).scores })))));
  for (const stream of viewModel.streams) {
    const suffix = isMultiStream ? ` of ${stream.stream}` : "", arrays = card.streams[stream.stream].arrays, explanation = getStreamExplanation(card, stream);
    const count = explanation.scores.length, scale = () => getShownScores(card, stream, { step: null, showsWords: state.showsWords });
    sections.push(collapsible(count === 1 ? `The one score${suffix}` : `All ${count} scores${suffix}`, () => allScores(scale()), count > MAX_PRINTED_SCORES));
    if (arrays.matrix?.row_axis === "row") sections.push(collapsible(`Row by row${suffix}`, () => labelledMatrix(arrays.matrix, stream, "The scores of each row", true)));
    if (arrays.per_layer) sections.push(collapsible(`Layer by layer${suffix}`, () => layerMaps(viewModel, arrays.per_layer, stream, explanation)));
    if (arrays.per_head) sections.push(collapsible(`Heads${suffix}`, () => headMap(arrays.per_head, stream, explanation)));
  }
  sections.push(collapsible("Certificate", () => keyValueTable(card.certificate)));
  sections.push(collapsible("Reproduce and cite", () => [...card.code_snippets.map(codeBlock), card.citation && h("p", { class: "ch-note" }, `Method: ${card.citation}`)]));
  return sections;
};

const labelledMatrix = (encoded, stream, caption, isSquare = false) => [
  h("p", { class: "ch-label" }, `${caption}; full colour is ${formatNumber(encoded.vmax, 3)}`),
  matrix({ rows: encoded.row_names, columns: stream.labels, values: encoded.numbers ??= decodeArray(encoded), vmax: encoded.vmax, label: caption, rowAxis: encoded.row_axis, isSquare, maxCellSize: 18 }),
];

const layerMaps = (viewModel, encoded, stream, explanation) => {
  if (stream.layout !== "grid") return labelledMatrix(encoded, stream, encoded.caption);
  const contentIndices = listContentUnits(explanation), maps = decodeRows(encoded).map((row) => contentIndices.map((unit) => row[unit]));
  return [h("p", { class: "ch-label" }, `${encoded.caption}; full colour is ${formatNumber(encoded.vmax, 3)}`),
    smallHeatMaps({ grid: explanation.units.grid, size: stream.size }, maps, encoded.vmax, viewModel.image, [], encoded.row_names.map((layer) => `layer ${layer}`))];
};

// Total contribution of each head to the units that are not special; selecting a head shows its units.
const headMap = (encoded, stream, explanation) => {
  const scoresByHead = decodeRows(encoded), contentIndices = listContentUnits(explanation), columns = encoded.shape[1];
  const contributions = scoresByHead.map((row) => contentIndices.reduce((sum, unit) => sum + Math.abs(row[unit] || 0), 0));
  const headBars = h("div", { "aria-live": "polite" });
  const selectHead = (layer, head) => {
    const scores = scoresByHead[layer * columns + head], scale = { labels: stream.labels, special: explanation.units.special, scores, vmax: computeVmax(scores, explanation.units.special) };
    headBars.replaceChildren(scoreBars(`Layer ${encoded.row_names[layer]}, head ${encoded.column_names[head]}: strongest units`, scale, findStrongest(scale, 8)));
  };
  const vmax = Math.max(...contributions) || 1;
  return [h("p", { class: "ch-label" }, `Total contribution of each head; full colour is ${formatNumber(vmax, 3)}. Select one to show its units.`),
    matrix({ rows: encoded.row_names.map((layer) => `layer ${layer}`), columns: encoded.column_names.map((head) => `head ${head}`), values: contributions, vmax, label: "Layer by head", maxCellSize: 26, onSelectRow: selectHead }), headBars];
};

const keyValueTable = (rows) => h("table", { class: "ch-key-values" }, h("tbody", null, rows.map(([key, value]) =>
  h("tr", null, h("th", { scope: "row" }, key), h("td", null, value)))));

const codeBlock = (source) => h("pre", { tabindex: 0 }, h("code", null, source));

const warningNotes = (warnings) => warnings.map((warning) =>
  h("p", { class: "ch-caution", role: "note" }, h("strong", null, "Warning: "), warning));

const agreementSection = (agreement, disagreements) => h("section", { class: "ch-agreement" },
  warningNotes(disagreements),
  h("h3", null, "Agreement of the methods"),
  h("div", { class: "ch-streams" }, agreement.map(({ stream, methods, values }) => h("div", null,
    agreement.length > 1 && h("p", { class: "ch-label" }, stream),
    scrollable("Agreement", h("table", { class: "ch-agreement-table" },
      h("thead", null, h("tr", null, h("td"), methods.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, methods.map((name, row) => h("tr", null, h("th", { scope: "row" }, name),
        values[row].map((tau) => applyColour(h("td", null, isMissing(tau) ? "–" : tau.toFixed(2).replace("-", "−")), tau, 1)))))))))),
  h("p", { class: "ch-note" }, "Kendall’s τ-b of the scores without special tokens: 1 is the same order, 0 no agreement, −1 the reverse order."));
