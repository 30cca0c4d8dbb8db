// Everything about one input: what the model saw and said, one card for each method or target, and how far they agree.
import { h, choice, folded, scrolled, unpacked } from "./dom.js";
import { isMissing, number } from "./format.js";
import { paint } from "./colour.js";
import { bars, everyScore, force, legend, prediction, strongest } from "./bars.js";
import { between } from "./links.js";
import { matrix } from "./matrix.js";
import { overTime, text } from "./text.js";
import { overlay, regions, seen, smallMaps } from "./picture.js";

const LONG = 100; // so many scores are printed only where they are unfolded
const partOf = (card, stream) => card.explanation.parts?.[stream.stream] ?? card.explanation;
const largest = (scores, special) => {
  const kept = scores.filter((score, place) => !special[place] && !isMissing(score)).map(Math.abs);
  return Math.max(0, ...kept) || 1;
};

// Numbers of a packed array with their rows; kept, because they are asked for again and again.
const rowsOf = (packed) => {
  packed.numbers ??= unpacked(packed);
  const width = packed.shape.at(-1), rows = packed.numbers.length / width;
  return Array.from({ length: rows }, (_, row) => Array.from(packed.numbers.subarray(row * width, (row + 1) * width)));
};

// What is shown of a stream: scores of all steps or of one, by token or by word.
const scaleOf = (card, stream, state) => {
  const part = partOf(card, stream), own = card.streams[stream.stream], steps = own.arrays.matrix;
  const stepped = state.step !== null && steps?.corner === "step";
  const scores = stepped ? rowsOf(steps)[state.step] : part.scores, full = stepped ? steps.full : own.full;
  if (!(state.words && stream.words)) {
    return { labels: stream.labels, special: part.units.special, lines: stream.lines, inside: stream.inside, evidence: stream.evidence, scores, full };
  }
  const { labels, special, lines, parents } = stream.words, sums = labels.map(() => null);
  parents.forEach((word, place) => { if (!isMissing(scores[place])) sums[word] = (sums[word] ?? 0) + scores[place]; });
  const evidence = stream.evidence && [...new Set(stream.evidence.map((place) => parents[place]))];
  return { labels, special, lines, evidence, scores: sums, full: largest(sums, special) };
};

export const input = (document_, options = {}) => {
  const { cards, streams, picture, found, notes, agreement, disagreements } = document_;
  const wide = streams.filter((stream) => stream.input).length > 1 || cards.some((card) => card.steps);
  const section = h("section", { class: "ch-input" });
  // The unit under the pointer stands out in every card.
  const point = (stream, unit) => {
    for (const other of section.querySelectorAll(`[data-stream="${CSS.escape(stream.stream)}"] [data-unit]`)) {
      other.classList.toggle("ch-also", unit !== null && other.dataset.unit === String(unit));
    }
  };
  section.append(...[
    options.head !== false && h("h2", null, document_.heading),
    h("div", { class: "ch-about" }, picture && seen(picture, found),
      h("div", null, h("p", { class: "ch-label" }, "Explained"), document_.explained.map((line) => h("p", null, line))),
      prediction(document_.prediction, options.onLabel)),
    notes.map((note) => h("p", { class: "ch-warn", role: "note" }, note)),
    h("div", { class: `ch-methods${wide ? " ch-wide" : ""}` }, cards.map((card) => drawCard(document_, card, point))),
    document_.links && between(document_.links, picture),
    agreement.length > 0 && agreementOf(agreement, disagreements ?? []),
  ].flat().filter(Boolean));
  return section;
};

const drawCard = (document_, card, point) => {
  const state = { step: null, words: false, way: 0, sliders: [] };
  const inputs = document_.streams.filter((stream) => stream.input);
  const boxes = inputs.map((stream) => h("div", { class: "ch-stream", "data-stream": stream.stream }));
  const render = () => boxes.forEach((box, place) => {
    const stream = inputs[place];
    box.replaceChildren(...drawStream(document_, card, stream, state, point, inputs.length > 1, choose, render).flat().filter(Boolean));
  });
  const chips = card.steps?.map(({ name, title }, step) =>
    h("button", { type: "button", class: "ch-chip", title, "aria-pressed": "false", click: () => choose(step) }, h("bdi", null, name)));
  const choose = (step) => {
    state.step = state.step === step ? null : step;
    chips?.forEach((chip, place) => chip.setAttribute("aria-pressed", String(place === state.step)));
    render();
  };
  render();
  return h("article", { class: "ch-card" },
    h("h3", null, card.title),
    card.citation && h("p", { class: "ch-note" }, card.citation),
    warningsOf(card.warnings ?? []),
    chips && h("div", null, h("p", { class: "ch-label" }, `${chips.length} ${document_.found.length ? "objects" : "steps"}: select one to show it alone`), h("div", { class: "ch-answer" }, chips)),
    h("div", { class: "ch-streams" }, boxes),
    h("div", { class: "ch-more" }, more(document_, card, state)));
};

const drawStream = (document_, card, stream, state, point, titled, choose, render) => {
  const scale = scaleOf(card, stream, state), own = card.streams[stream.stream], part = partOf(card, stream);
  const told = (unit) => tellOf(document_, card, stream, state, scale, unit);
  const notes = [];
  if (stream.shape === "text" && scale.special.includes(true)) notes.push("underlined: special tokens, outside the scale");
  if (scale.scores.some(isMissing)) notes.push("hatched: no score");
  if (scale.evidence?.length) notes.push("dotted line: marked as evidence");
  const level = stream.words && choice("Units", ["Tokens", "Words"], state.words ? 1 : 0, (words) => { state.words = words === 1; render(); });
  const place = drawPlace(document_, stream, scale, own, part, state, told, point);
  const overPicture = stream.shape === "grid" || stream.shape === "boxes";
  const key = legend(scale, own.signed, notes, overPicture), best = bars("Strongest units", scale, strongest(scale, stream.shape === "list" ? 12 : 6));
  return [
    titled && h("h4", null, stream.title),
    level,
    overPicture ? h("div", { class: "ch-beside" }, h("div", null, place, key), best) : [place, key],
    steps(document_, card, stream, state, choose),
    !overPicture && best,
  ];
};

// The units where they lie; nothing for a mere list of them, which the bars show.
const drawPlace = (document_, stream, scale, own, part, state, told, point) => {
  const { picture, found } = document_;
  if (stream.shape === "text") return text(scale, stream.as_written, told, (unit) => { if (!state.words) point(stream, unit); });
  if (stream.shape === "boxes") return regions({ boxes: part.units.boxes }, scale, picture, told, (unit) => point(stream, unit));
  if (stream.shape === "time") return overTime(state.step === null ? own.moments : scale.scores.map((score, place) => [scale.labels[place], score]), scale.full, own.signed);
  if (stream.shape !== "grid") return null;
  const kept = units(part), cut = state.step === null ? own.cut : own.cuts?.[state.step], patches = { ...scale, cut, scores: kept.map((unit) => scale.scores[unit]) };
  return overlay({ grid: part.units.grid, size: stream.size, objects: objectsOf(found, own, patches, kept) }, patches, picture, found, state, (patch) => told(kept[patch]), state.step);
};

// What a detector found, each with its own scores of the patches and the score from which on they are its mask.
const objectsOf = (found, own, patches, kept) => {
  const rows = own.cuts && rowsOf(own.arrays.matrix);
  return found.map(({ step }) => ({ step, cut: own.cuts ? own.cuts[step] : own.cut, scores: rows ? kept.map((unit) => rows[step][unit]) : patches.scores }));
};

const units = (part) => part.units.special.flatMap((special, place) => (special ? [] : [place]));

// A unit's name and raw score and, where several stand side by side, what each of them gives it.
const tellOf = (document_, card, stream, state, scale, unit) => {
  const lines = [[scale.labels[unit], number(scale.scores[unit], 5)]];
  if (scale.inside?.[unit]) lines.push([`in ${scale.inside[unit]}`, ""]);
  if (scale.evidence?.includes(unit)) lines.push(["marked as evidence", ""]);
  if (document_.cards.length > 1) for (const other of document_.cards) {
    if (other !== card) lines.push([other.title, number(scaleOf(other, stream, { ...state, step: null }).scores[unit], 3)]);
  }
  return lines;
};

const steps = (document_, card, stream, state, choose) => {
  const found = card.streams[stream.stream].arrays.matrix, part = partOf(card, stream);
  if (found?.corner !== "step") return null;
  const rows = rowsOf(found), caption = h("p", { class: "ch-label" }, `${document_.found.length ? "Object by object" : "Step by step"}; full colour is ${number(found.full, 3)}`);
  if (stream.shape === "grid") {
    const kept = units(part), maps = rows.map((row) => kept.map((unit) => row[unit]));
    return h("div", null, caption, smallMaps({ grid: part.units.grid, size: stream.size }, maps, found.full, document_.picture, document_.found, found.rows, choose, card.streams[stream.stream].cuts));
  }
  return h("div", null, caption, matrix({ rows: found.rows, columns: stream.labels, values: rows.flat(), full: found.full,
    label: "Step by unit", corner: "step", chosen: state.step, choose, largest: stream.labels.length <= 32 ? 26 : 16 }));
};

// What is folded away: all scores, rows, layers and heads, how it adds up, what was checked, how to get it again.
const more = (document_, card, state) => {
  const several = document_.streams.length > 1, made = [];
  if (card.force) made.push(folded("From the base value to the output", () =>
    force(card.force, document_.streams.map((stream) => ({ labels: stream.labels, scores: partOf(card, stream).scores })))));
  for (const stream of document_.streams) {
    const of = several ? ` of ${stream.stream}` : "", own = card.streams[stream.stream].arrays, part = partOf(card, stream);
    const count = part.scores.length, scale = () => scaleOf(card, stream, { step: null, words: state.words });
    made.push(folded(count === 1 ? `The one score${of}` : `All ${count} scores${of}`, () => everyScore(scale()), count > LONG));
    if (own.matrix?.corner === "row") made.push(folded(`Row by row${of}`, () => named(own.matrix, stream, "The scores of each row", true)));
    if (own.layers) made.push(folded(`Layer by layer${of}`, () => layers(document_, own.layers, stream, part)));
    if (own.heads) made.push(folded(`Heads${of}`, () => heads(own.heads, stream, part)));
  }
  made.push(folded("Certificate", () => facts(card.certificate)));
  made.push(folded("Reproduce and cite", () => [...card.recipe.map(code), card.citation && h("p", { class: "ch-note" }, `Method: ${card.citation}`)]));
  return made;
};

const named = (packed, stream, caption, square = false) => [
  h("p", { class: "ch-label" }, `${caption}; full colour is ${number(packed.full, 3)}`),
  matrix({ rows: packed.rows, columns: stream.labels, values: packed.numbers ??= unpacked(packed), full: packed.full, label: caption, corner: packed.corner, square, largest: 18 }),
];

const layers = (document_, packed, stream, part) => {
  if (stream.shape !== "grid") return named(packed, stream, packed.caption);
  const kept = units(part), maps = rowsOf(packed).map((row) => kept.map((unit) => row[unit]));
  return [h("p", { class: "ch-label" }, `${packed.caption}; full colour is ${number(packed.full, 3)}`),
    smallMaps({ grid: part.units.grid, size: stream.size }, maps, packed.full, document_.picture, [], packed.rows.map((layer) => `layer ${layer}`))];
};

// How much each head gives to all units that are not special; a chosen one shows to which.
const heads = (packed, stream, part) => {
  const every = rowsOf(packed), kept = units(part), columns = packed.shape[1];
  const weight = every.map((row) => kept.reduce((sum, unit) => sum + Math.abs(row[unit] || 0), 0));
  const below = h("div", { "aria-live": "polite" });
  const choose = (layer, head) => {
    const scores = every[layer * columns + head], scale = { labels: stream.labels, special: part.units.special, scores, full: largest(scores, part.units.special) };
    below.replaceChildren(bars(`Layer ${packed.rows[layer]}, head ${packed.columns[head]}: strongest units`, scale, strongest(scale, 8)));
  };
  const full = Math.max(...weight) || 1;
  return [h("p", { class: "ch-label" }, `Total contribution of each head; full colour is ${number(full, 3)}. Select one to show its units.`),
    matrix({ rows: packed.rows.map((layer) => `layer ${layer}`), columns: packed.columns.map((head) => `head ${head}`), values: weight, full, label: "Layer by head", largest: 26, choose }), below];
};

const facts = (rows) => h("table", { class: "ch-facts" }, h("tbody", null, rows.map(([key, value]) =>
  h("tr", null, h("th", { scope: "row" }, key), h("td", null, value)))));

const code = (source) => h("pre", { tabindex: 0 }, h("code", null, source));

const warningsOf = (warnings) => warnings.map((warning) =>
  h("p", { class: "ch-caution", role: "note" }, h("strong", null, "Warning: "), warning));

const agreementOf = (agreement, disagreements) => h("section", { class: "ch-agreement" },
  h("h3", null, "Agreement of the methods"),
  warningsOf(disagreements),
  h("div", { class: "ch-streams" }, agreement.map(({ stream, methods, values }) => h("div", null,
    agreement.length > 1 && h("p", { class: "ch-label" }, stream),
    scrolled("Agreement", h("table", { class: "ch-agree" },
      h("thead", null, h("tr", null, h("td"), methods.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", null, methods.map((name, row) => h("tr", null, h("th", { scope: "row" }, name),
        values[row].map((tau) => paint(h("td", null, isMissing(tau) ? "–" : tau.toFixed(2).replace("-", "−")), tau, 1)))))))))),
  h("p", { class: "ch-note" }, "Kendall’s τ-b of the scores without special tokens: 1 is the same order, 0 no agreement, −1 the reverse order."));
