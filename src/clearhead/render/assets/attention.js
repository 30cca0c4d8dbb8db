// Attention: an overview of all heads, one head as a matrix and as links, and the scores by depth.
import { h, segmentedControl, decodeArray } from "./dom.js";
import { formatNumber, truncate } from "./format.js";
import { isDarkTheme, resolveColour, redrawOnThemeChange } from "./colour.js";
import { renderCells, matrix } from "./matrix.js";
import { streamLinks, linkDiagram } from "./links.js";
import { addKeyboardCursor, hideTooltip, showTooltip } from "./tooltip.js";

const decodeWeight = (byte) => (byte / 255) ** 2;
const formatWeight = (weight) => formatNumber(weight, 2);

// Attention between streams: the direction is selected by name; views that were drawn are cached.
export const multiStreamAttentionView = (viewModel, options = {}) => {
  const box = h("div"), views = [];
  const showMap = (index) => {
    const map = viewModel.maps[index];
    views[index] ??= attentionView(map, { ...options, showHeading: false, fetchHeadMap: options.fetchHeadMap && ((layer, head) => options.fetchHeadMap(layer, head, map.name)) });
    box.replaceChildren(views[index]);
  };
  showMap(0);
  return h("div", { class: "ch-input ch-multi-stream" }, options.showHeading !== false && h("h2", null, viewModel.heading),
    viewModel.links && streamLinks(viewModel.links, viewModel.image),
    h("div", { class: "ch-controls" }, h("span", null, "Direction of attention"), segmentedControl("Direction of attention", viewModel.maps.map(({ name }) => name), 0, showMap)), box);
};

export const attentionView = (viewModel, options = {}) => {
  const { tokens, key_tokens: keyTokens = tokens, patterns, maps } = viewModel, bytes = decodeArray(maps), [layers, heads] = maps.shape;
  const mapSize = viewModel.map_size, area = mapSize[0] * mapSize[1], isFullSize = mapSize[0] === tokens.length && mapSize[1] === keyTokens.length;
  const getMap = (layer, head) => bytes.subarray((layer * heads + head) * area, (layer * heads + head + 1) * area);
  const state = { layer: layers - 1, head: 0, mode: 0 };
  const headView = h("div", { class: "ch-single-head" });
  const selectHead = async (layer, head) => {
    Object.assign(state, { layer, head });
    layerSelect.value = layer;
    headSelect.value = head;
    overview.setSelection(layer, head);
    const fullMap = isFullSize ? getMap(layer, head) : await options.fetchHeadMap?.(layer, head).catch(() => null); // a map that is no longer cached is drawn pooled
    if (state.layer !== layer || state.head !== head) return; // another head was selected in the meantime
    headView.replaceChildren(...headElements(viewModel, layer, head, fullMap, getMap(layer, head), state));
  };
  const makeSelect = (name, count, selected) => h("select", { change: () => selectHead(Number(layerSelect.value), Number(headSelect.value)) },
    Array.from({ length: count }, (_, index) => h("option", { value: index, selected: index === selected }, `${name} ${index}`)));
  const layerSelect = makeSelect("layer", layers, state.layer), headSelect = makeSelect("head", heads, 0);
  const overview = headOverview(layers, heads, mapSize, keyTokens.length, getMap, (layer, head) => [
    [`layer ${layer}, head ${head}`, ""], [patterns[layer][head], ""],
    ...(viewModel.mean_patterns ? [["average over other inputs", viewModel.mean_patterns[layer][head]]] : [])], selectHead);
  selectHead(state.layer, 0);
  return h("section", { class: "ch-input ch-attention" },
    options.showHeading !== false && h("h2", null, viewModel.heading),
    h("p", { class: "ch-note" }, `${viewModel.model} · ${layers} layers of ${heads} heads · ${keyTokens === tokens ? "" : `${tokens.length} units attend to `}${keyTokens.length} units${viewModel.readout_row === null ? "" : ` · read-out row: ${tokens[viewModel.readout_row]}`}`),
    h("div", { class: "ch-panels" },
      h("div", { class: "ch-panel" }, h("h3", null, "All heads"), h("p", { class: "ch-note" }, "The deepest layer is at the top; each map is scaled by its own largest weight. Select a head to show it."), overview),
      h("div", { class: "ch-panel" }, h("h3", null, "Single head"),
        h("p", { class: "ch-controls" }, h("label", null, "Layer ", layerSelect), h("label", null, "Head ", headSelect)), headView)),
    h("div", { class: "ch-panel" }, h("h3", null, "By depth"), depthView(viewModel)),
    h("p", { class: "ch-note" }, viewModel.conclusion));
};

// The byte of full colour: the largest weight, but at least four times the uniform weight, so that uniform
// heads look uniform.
const computeFullByte = (bytes, units) => bytes.reduce((largest, byte) => Math.max(largest, byte), Math.min(255, Math.ceil(255 * Math.sqrt(4 / units))));

// Small maps side by side on one canvas, the deepest layer on top.
const headOverview = (layers, heads, mapSize, units, getMap, getTooltip, onSelect) => {
  const gap = 4, tileSize = Math.max(14, Math.min(56, Math.floor(470 / Math.max(heads, layers)) - gap)), left = 22, top = 16;
  const width = left + heads * (tileSize + gap), height = top + layers * (tileSize + gap);
  const canvas = h("canvas", { class: "ch-canvas", role: "img", "aria-label": `Attention maps of ${layers} × ${heads} heads` });
  let selectedHead = [layers - 1, 0], hoveredHead = null, mapsCanvas = null;
  const getCorner = (layer, head) => [left + head * (tileSize + gap), top + (layers - 1 - layer) * (tileSize + gap)];
  const scale = Math.max(1, devicePixelRatio * 1.5);
  // All maps; they are drawn once and cached, and the frames are drawn over them.
  const drawMaps = () => {
    const canvasOfMaps = h("canvas", { width: width * scale, height: height * scale }), context = canvasOfMaps.getContext("2d"), isDark = isDarkTheme(canvas);
    context.scale(scale, scale);
    context.imageSmoothingEnabled = Math.max(...mapSize) > tileSize;
    context.font = "11px ui-sans-serif, system-ui, sans-serif";
    context.fillStyle = resolveColour(canvas.parentElement, "--soft");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.strokeStyle = resolveColour(canvas.parentElement, "--rule");
    for (let head = 0; head < heads; head++) context.fillText(head, left + head * (tileSize + gap) + tileSize / 2, 8);
    for (let layer = 0; layer < layers; layer++) {
      context.fillText(layer, 10, getCorner(layer, 0)[1] + tileSize / 2);
      for (let head = 0; head < heads; head++) {
        const position = getCorner(layer, head);
        context.drawImage(renderCells(getMap(layer, head), ...mapSize, computeFullByte(getMap(layer, head), units), isDark, true), ...position, tileSize, tileSize);
        context.strokeRect(position[0] - 0.5, position[1] - 0.5, tileSize + 1, tileSize + 1);
      }
    }
    return canvasOfMaps;
  };
  const draw = (isStale) => {
    if (isStale || !mapsCanvas) mapsCanvas = drawMaps();
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.drawImage(mapsCanvas, 0, 0);
    context.scale(scale, scale);
    for (const [position, colour, lineWidth] of [[hoveredHead, "--ink", 1.5], [selectedHead, "--accent", 2.5]]) {
      if (!position) continue;
      context.strokeStyle = resolveColour(canvas.parentElement, colour);
      context.lineWidth = lineWidth;
      const [x, y] = getCorner(...position);
      context.strokeRect(x - 1, y - 1, tileSize + 2, tileSize + 2);
    }
  };
  const hoverHead = (layer, head, announce) => {
    hoveredHead = [layer, head];
    draw();
    const rect = canvas.getBoundingClientRect(), [x, y] = getCorner(layer, head);
    showTooltip(canvas, getTooltip(layer, head), { left: rect.left + x, right: rect.left + x + tileSize, top: rect.top + y, bottom: rect.top + y + tileSize }, announce);
  };
  const clearSelection = () => { if (hoveredHead) { hoveredHead = null; draw(); hideTooltip(canvas); } };
  const findHead = (event) => {
    const head = Math.floor((event.offsetX - left) / (tileSize + gap)), rowFromTop = Math.floor((event.offsetY - top) / (tileSize + gap));
    return head >= 0 && head < heads && rowFromTop >= 0 && rowFromTop < layers ? [layers - 1 - rowFromTop, head] : null;
  };
  canvas.addEventListener("pointermove", (event) => { const position = findHead(event); if (!position) clearSelection(); else if (String(position) !== String(hoveredHead)) hoverHead(...position); });
  canvas.addEventListener("pointerleave", clearSelection);
  canvas.addEventListener("click", (event) => { const position = findHead(event); if (position) onSelect(...position); });
  const frame = h("div", { class: "ch-scroll", tabindex: 0, role: "group", "aria-label": "Heads: arrow keys move between heads, Enter shows one" }, canvas);
  addKeyboardCursor(frame, () => [layers, heads], (row, head) => hoverHead(layers - 1 - row, head, true), clearSelection, (row, head) => onSelect(layers - 1 - row, head));
  const observer = new ResizeObserver(() => { if (canvas.isConnected) { observer.disconnect(); draw(true); } });
  observer.observe(frame);
  redrawOnThemeChange(canvas, () => draw(true));
  frame.setSelection = (layer, head) => { selectedHead = [layer, head]; if (canvas.isConnected) draw(); };
  return frame;
};

// fullMap: all weights as bytes, or null; pooledMap: the largest weight of each block.
const headElements = (viewModel, layer, head, fullMap, pooledMap, state) => {
  const { tokens, key_tokens: keyTokens = tokens, patterns, mean_patterns: meanPatterns } = viewModel, mapSize = viewModel.map_size, isSquare = keyTokens === tokens, numKeys = keyTokens.length, box = h("div");
  const averageNote = meanPatterns ? `; average over other inputs: ${meanPatterns[layer][head]}` : "";
  const showMode = (mode) => {
    state.mode = mode;
    box.replaceChildren(mode === 0 ? matrixView() : linksView(viewModel, layer, head, fullMap));
  };
  const describeScale = (bytes) => `Full colour is a weight of ${formatWeight(decodeWeight(computeFullByte(bytes, numKeys)))}; colours are on a square-root scale.`;
  const matrixView = () => {
    if (fullMap) {
      return h("div", null, h("p", { class: "ch-note" }, describeScale(fullMap)), matrix({ rows: tokens, columns: keyTokens, values: fullMap, vmax: computeFullByte(fullMap, numKeys), isUnsigned: true, isSquare, maxCellSize: 22, maxWidth: 560, hasTable: false,
        label: "Attention, query × key", getTooltip: (query, key) => [[`${tokens[query]} → ${keyTokens[key]}`, formatWeight(decodeWeight(fullMap[query * numKeys + key]))]] }));
    }
    const nameBlocks = (units, count) => Array.from({ length: count }, (_, block) => { const start = Math.floor(block * units.length / count); return `${start} ${units[start]}${count < units.length ? " …" : ""}`; });
    const rows = nameBlocks(tokens, mapSize[0]), columns = nameBlocks(keyTokens, mapSize[1]);
    return h("div", null, h("p", { class: "ch-note" }, describeScale(pooledMap)), matrix({ rows, columns, values: pooledMap, vmax: computeFullByte(pooledMap, numKeys), isUnsigned: true, isSquare, maxWidth: 560, maxCellSize: 6, hasTable: false,
      label: "Attention, blocks of units", getTooltip: (query, key) => [[`${rows[query]} → ${columns[key]}`, `at most ${formatWeight(decodeWeight(pooledMap[query * mapSize[1] + key]))}`]] }),
    h("p", { class: "ch-note" }, `Summarised: ${tokens.length} × ${numKeys} units in ${mapSize[0]} × ${mapSize[1]} blocks, the largest weight of each.`));
  };
  const hasLinks = fullMap || viewModel.head_links; // blocks have no links of their own
  showMode(hasLinks ? state.mode : 0);
  return [h("p", { class: "ch-note" }, `Layer ${layer}, head ${head}: ${patterns[layer][head]}${averageNote}`),
    hasLinks && segmentedControl("Display of the head", ["Matrix", "Links"], state.mode, showMode), box].filter(Boolean);
};

// A head's links: every one of a short input, the strongest of a long one.
const linksView = (viewModel, layer, head, fullMap) => {
  const { tokens, key_tokens: keyTokens = tokens } = viewModel, numKeys = keyTokens.length, row = (query) => Array.from(fullMap.subarray(query * numKeys, (query + 1) * numKeys), (byte, key) => [query, key, decodeWeight(byte)]);
  const allLinks = fullMap ? tokens.flatMap((_, query) => takeStrongest(row(query), numKeys <= 80 ? numKeys : 4)) : decodeLinks(viewModel.head_links[layer][head]);
  const note = fullMap ? "Left attends to right. Point at a unit to show only its links." : `Left attends to right: the ${allLinks.length} strongest links of ${numKeys} units. Point at a unit to highlight its links.`;
  return h("div", null, h("p", { class: "ch-note" }, note),
    linkDiagram({ left: tokens, right: keyTokens, allLinks, getUnitLinks: fullMap ? (side, unit) => (side === 0 ? row(unit) : null) : null, names: ["Queries", "Keys"], verbs: ["attends to", "is attended to by"] }));
};

const takeStrongest = (links, count) => links.sort((a, b) => b[2] - a[2]).slice(0, count);

const decodeLinks = ({ pairs, weights }) => {
  const indices = decodeArray(pairs);
  return Array.from(decodeArray(weights), (byte, index) => [indices[2 * index], indices[2 * index + 1], decodeWeight(byte)]);
};

// Raw attention, rollout and flow of the read-out row by layer: as a table, and as a layered graph.
const depthView = (viewModel) => {
  const measures = Object.keys(viewModel.scores_by_depth), box = h("div"), state = { measure: Math.max(0, measures.indexOf("rollout")), mode: 0 }, { key_tokens: keyTokens = viewModel.tokens } = viewModel;
  const showMode = () => {
    const encoded = viewModel.scores_by_depth[measures[state.measure]], values = encoded.numbers ??= decodeArray(encoded), layers = encoded.shape[0];
    if (state.mode === 1) return box.replaceChildren(layerGraph(viewModel, values, encoded.vmax));
    const order = Array.from({ length: layers }, (_, row) => layers - 1 - row), numKeys = keyTokens.length;
    const reversed = Float32Array.from({ length: values.length }, (_, index) => values[order[Math.floor(index / numKeys)] * numKeys + (index % numKeys)]);
    // The read-out position attends mostly to itself, and would leave no colour for the other units.
    const largest = reversed.reduce((maximum, value, index) => (index % numKeys === viewModel.readout_row && numKeys > 1 ? maximum : Math.max(maximum, value)), 0) || encoded.vmax;
    const excessNote = reversed.some((value) => value > largest) ? `, which ${keyTokens[viewModel.readout_row]} itself exceeds` : "";
    box.replaceChildren(h("p", { class: "ch-note" }, `Full colour is ${formatNumber(largest, 3)}${excessNote}; colours are on a square-root scale.`),
      matrix({ rows: order.map((layer) => `layer ${layer}`), columns: keyTokens, values: reversed.map((value) => Math.sqrt(Math.max(0, value) / largest)), vmax: 1, isUnsigned: true, label: `${measures[state.measure]} by layer`, rowAxis: "layer", maxWidth: 1000,
        texts: order.map((_, row) => keyTokens.map((__, unit) => formatNumber(reversed[row * numKeys + unit], 3))), getTooltip: (row, unit) => [[`layer ${order[row]}, ${keyTokens[unit]}`, formatNumber(reversed[row * numKeys + unit], 3)]] }));
  };
  showMode();
  return h("div", { class: "ch-depth" }, h("div", { class: "ch-controls" },
    measures.length > 1 ? segmentedControl("Measure", measures, state.measure, (index) => { state.measure = index; showMode(); }) : h("span", null, measures[0]),
    viewModel.layer_graph && segmentedControl("Display", ["Table", "Graph"], 0, (index) => { state.mode = index; showMode(); })), box);
};

// Layers from left to right; the size of a dot is the unit's score, the width of a line the mean attention of the heads.
const layerGraph = (viewModel, values, vmax) => {
  const { units, links: allLinks, num_units: numUnits } = viewModel.layer_graph, tokens = viewModel.tokens, numTokens = tokens.length, layers = values.length / numTokens;
  const ROW_HEIGHT = 20, LEFT_MARGIN = 130, layerWidth = Math.max(70, Math.min(150, 820 / layers)), width = LEFT_MARGIN + layers * layerWidth + 44, height = units.length * ROW_HEIGHT + 30;
  const canvas = h("canvas", { class: "ch-canvas", role: "img", "aria-label": "Layered graph of attention; the table has the same values" });
  const draw = () => {
    const scale = Math.max(1, devicePixelRatio * 1.5), parent = canvas.parentElement;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d"), y = (index) => 28 + (index + 0.5) * ROW_HEIGHT, x = (layer) => LEFT_MARGIN + layer * layerWidth;
    context.scale(scale, scale);
    context.strokeStyle = resolveColour(parent, "--link");
    for (const [layer, query, key, weight] of allLinks) {
      context.globalAlpha = Math.min(1, 0.08 + weight);
      context.lineWidth = 0.6 + 3 * weight;
      context.beginPath();
      context.moveTo(x(layer), y(key));
      context.bezierCurveTo(x(layer + 0.5), y(key), x(layer + 0.5), y(query), x(layer + 1), y(query));
      context.stroke();
    }
    context.globalAlpha = 1;
    context.font = "12px ui-sans-serif, system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = resolveColour(parent, "--ink");
    units.forEach((unit, index) => context.fillText(truncate(tokens[unit], 17), LEFT_MARGIN - 10, y(index)));
    context.fillStyle = resolveColour(parent, "--soft");
    context.textAlign = "center";
    for (let layer = 0; layer <= layers; layer++) context.fillText(layer ? `layer ${layer - 1}` : "input", x(layer), 10);
    context.fillStyle = resolveColour(parent, "--accent");
    for (let layer = 0; layer < layers; layer++) units.forEach((unit, index) => {
      context.beginPath();
      context.arc(x(layer + 1), y(index), 1.5 + 6 * Math.sqrt(Math.max(0, values[layer * numTokens + unit]) / vmax), 0, 2 * Math.PI);
      context.fill();
    });
  };
  const frame = h("div", { class: "ch-scroll ch-unscrolled", tabindex: 0, role: "region", "aria-label": "Layered graph" }, canvas);
  const observer = new ResizeObserver(() => { if (canvas.isConnected) { observer.disconnect(); draw(); } });
  observer.observe(frame);
  redrawOnThemeChange(canvas, draw);
  const summaryNote = numUnits > units.length ? ` Summarised: the ${units.length} of ${numUnits} units with the largest values.` : "";
  return h("div", null, h("p", { class: "ch-note" }, `Lines: mean attention of each layer’s heads. Dots: the share of each unit in ${viewModel.readout_row === null ? "all rows" : "the read-out row"}.${summaryNote}`), frame);
};
