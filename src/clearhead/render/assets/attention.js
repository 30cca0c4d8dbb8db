// Attention: every head at a glance, one head as a matrix and as links, and how what is read comes up through the layers.
import { h, choice, unpacked } from "./dom.js";
import { number, short } from "./format.js";
import { isDark, styled, whenColoursChange } from "./colour.js";
import { cells, matrix } from "./matrix.js";
import { between, links } from "./links.js";
import { cursor, hush, tell } from "./tip.js";

const weightOf = (byte) => (byte / 255) ** 2;
const said = (weight) => number(weight, 2);

// Which stream looks at which is chosen by name; each choice keeps what it has drawn.
export const streams = (document_, options = {}) => {
  const box = h("div"), drawn = [];
  const show = (place) => {
    const own = document_.maps[place];
    drawn[place] ??= attention(own, { ...options, head: false, tile: options.tile && ((layer, head) => options.tile(layer, head, own.name)) });
    box.replaceChildren(drawn[place]);
  };
  show(0);
  return h("div", { class: "ch-input ch-chosen-of" }, options.head !== false && h("h2", null, document_.heading),
    document_.links && between(document_.links, document_.picture),
    h("div", { class: "ch-picks" }, h("span", null, "Direction of attention"), choice("Direction of attention", document_.maps.map(({ name }) => name), 0, show)), box);
};

export const attention = (document_, options = {}) => {
  const { tokens, keys = tokens, patterns, tiles } = document_, bytes = unpacked(tiles), [layers, heads] = tiles.shape;
  const size = sizeOf(document_), area = size[0] * size[1], exact = size[0] === tokens.length && size[1] === keys.length;
  const tileOf = (layer, head) => bytes.subarray((layer * heads + head) * area, (layer * heads + head + 1) * area);
  const state = { layer: layers - 1, head: 0, way: 0 };
  const below = h("div", { class: "ch-head-of" });
  const show = async (layer, head) => {
    Object.assign(state, { layer, head });
    layerOf.value = layer;
    headOf.value = head;
    overview.choose(layer, head);
    const whole = exact ? tileOf(layer, head) : await options.tile?.(layer, head).catch(() => null); // one that is kept no longer is drawn pooled
    if (state.layer !== layer || state.head !== head) return; // another was chosen while this one came
    below.replaceChildren(...oneHead(document_, layer, head, whole, tileOf(layer, head), state));
  };
  const pick = (name, count, own) => h("select", { change: () => show(Number(layerOf.value), Number(headOf.value)) },
    Array.from({ length: count }, (_, place) => h("option", { value: place, selected: place === own }, `${name} ${place}`)));
  const layerOf = pick("layer", layers, state.layer), headOf = pick("head", heads, 0);
  const overview = everyHead(layers, heads, size, keys.length, tileOf, (layer, head) => [
    [`layer ${layer}, head ${head}`, ""], [patterns[layer][head], ""],
    ...(document_.beside ? [["average over other inputs", document_.beside[layer][head]]] : [])], show);
  show(state.layer, 0);
  return h("section", { class: "ch-input ch-attention" },
    options.head !== false && h("h2", null, document_.heading),
    h("p", { class: "ch-note" }, `${document_.model} · ${layers} layers of ${heads} heads · ${keys === tokens ? "" : `${tokens.length} units attend to `}${keys.length} units${document_.row === null ? "" : ` · read-out row: ${tokens[document_.row]}`}`),
    h("div", { class: "ch-panels" },
      h("div", { class: "ch-panel" }, h("h3", null, "All heads"), h("p", { class: "ch-note" }, "The deepest layer is at the top; each map is scaled by its own largest weight. Select a head to show it."), overview),
      h("div", { class: "ch-panel" }, h("h3", null, "Single head"),
        h("p", { class: "ch-picks" }, h("label", null, "Layer ", layerOf), h("label", null, "Head ", headOf)), below)),
    h("div", { class: "ch-panel" }, h("h3", null, "By depth"), depth(document_)),
    h("p", { class: "ch-note" }, document_.says));
};

// Rows and columns of the maps in the document; those of earlier versions are square.
const sizeOf = ({ size }) => (Array.isArray(size) ? size : [size, size]);

// What full colour stands for: the largest weight, but at least four times an even one, so that even heads look even.
const most = (bytes, units) => bytes.reduce((found, byte) => Math.max(found, byte), Math.min(255, Math.ceil(255 * Math.sqrt(4 / units))));

// Small maps side by side on one canvas, the deepest layer on top.
const everyHead = (layers, heads, size, units, tileOf, told, choose) => {
  const gap = 4, edge = Math.max(14, Math.min(56, Math.floor(470 / Math.max(heads, layers)) - gap)), left = 22, top = 16;
  const width = left + heads * (edge + gap), height = top + layers * (edge + gap);
  const canvas = h("canvas", { class: "ch-canvas", role: "img", "aria-label": `Attention maps of ${layers} × ${heads} heads` });
  let chosen = [layers - 1, 0], pointed = null, sheet = null;
  const corner = (layer, head) => [left + head * (edge + gap), top + (layers - 1 - layer) * (edge + gap)];
  const scale = Math.max(1, devicePixelRatio * 1.5);
  // All maps, drawn once; frames come over them.
  const maps = () => {
    const made = h("canvas", { width: width * scale, height: height * scale }), context = made.getContext("2d"), dark = isDark(canvas);
    context.scale(scale, scale);
    context.imageSmoothingEnabled = Math.max(...size) > edge;
    context.font = "11px ui-sans-serif, system-ui, sans-serif";
    context.fillStyle = styled(canvas.parentElement, "--soft");
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.strokeStyle = styled(canvas.parentElement, "--rule");
    for (let head = 0; head < heads; head++) context.fillText(head, left + head * (edge + gap) + edge / 2, 8);
    for (let layer = 0; layer < layers; layer++) {
      context.fillText(layer, 10, corner(layer, 0)[1] + edge / 2);
      for (let head = 0; head < heads; head++) {
        const at = corner(layer, head);
        context.drawImage(cells(tileOf(layer, head), ...size, most(tileOf(layer, head), units), dark, true), ...at, edge, edge);
        context.strokeRect(at[0] - 0.5, at[1] - 0.5, edge + 1, edge + 1);
      }
    }
    return made;
  };
  const draw = (fresh) => {
    if (fresh || !sheet) sheet = maps();
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.drawImage(sheet, 0, 0);
    context.scale(scale, scale);
    for (const [place, colour, line] of [[pointed, "--ink", 1.5], [chosen, "--accent", 2.5]]) {
      if (!place) continue;
      context.strokeStyle = styled(canvas.parentElement, colour);
      context.lineWidth = line;
      const [x, y] = corner(...place);
      context.strokeRect(x - 1, y - 1, edge + 2, edge + 2);
    }
  };
  const point = (layer, head, aloud) => {
    pointed = [layer, head];
    draw();
    const box = canvas.getBoundingClientRect(), [x, y] = corner(layer, head);
    tell(canvas, told(layer, head), { left: box.left + x, right: box.left + x + edge, top: box.top + y, bottom: box.top + y + edge }, aloud);
  };
  const leave = () => { if (pointed) { pointed = null; draw(); hush(canvas); } };
  const place = (event) => {
    const head = Math.floor((event.offsetX - left) / (edge + gap)), up = Math.floor((event.offsetY - top) / (edge + gap));
    return head >= 0 && head < heads && up >= 0 && up < layers ? [layers - 1 - up, head] : null;
  };
  canvas.addEventListener("pointermove", (event) => { const at = place(event); if (!at) leave(); else if (String(at) !== String(pointed)) point(...at); });
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("click", (event) => { const at = place(event); if (at) choose(...at); });
  const frame = h("div", { class: "ch-scroll", tabindex: 0, role: "group", "aria-label": "Heads: arrow keys move between heads, Enter shows one" }, canvas);
  cursor(frame, () => [layers, heads], (row, head) => point(layers - 1 - row, head, true), leave, (row, head) => choose(layers - 1 - row, head));
  const seen = new ResizeObserver(() => { if (canvas.isConnected) { seen.disconnect(); draw(true); } });
  seen.observe(frame);
  whenColoursChange(canvas, () => draw(true));
  frame.choose = (layer, head) => { chosen = [layer, head]; if (canvas.isConnected) draw(); };
  return frame;
};

// whole: every weight in bytes, if there is one; pooled: the largest in each block.
const oneHead = (document_, layer, head, whole, pooled, state) => {
  const { tokens, keys = tokens, patterns, beside } = document_, size = sizeOf(document_), square = keys === tokens, n = keys.length, box = h("div");
  const average = beside ? `; average over other inputs: ${beside[layer][head]}` : "";
  const show = (way) => {
    state.way = way;
    box.replaceChildren(way === 0 ? map() : linksOf(document_, layer, head, whole));
  };
  const scaled = (bytes) => `Full colour is a weight of ${said(weightOf(most(bytes, n)))}; colours are on a square-root scale.`;
  const map = () => {
    if (whole) {
      return h("div", null, h("p", { class: "ch-note" }, scaled(whole)), matrix({ rows: tokens, columns: keys, values: whole, full: most(whole, n), weights: true, square, largest: 22, room: 560, table: false,
        label: "Attention, query × key", told: (query, key) => [[`${tokens[query]} → ${keys[key]}`, said(weightOf(whole[query * n + key]))]] }));
    }
    const blocks = (units, count) => Array.from({ length: count }, (_, block) => { const start = Math.floor(block * units.length / count); return `${start} ${units[start]}${count < units.length ? " …" : ""}`; });
    const rows = blocks(tokens, size[0]), columns = blocks(keys, size[1]);
    return h("div", null, h("p", { class: "ch-note" }, scaled(pooled)), matrix({ rows, columns, values: pooled, full: most(pooled, n), weights: true, square, room: 560, largest: 6, table: false,
      label: "Attention, blocks of units", told: (query, key) => [[`${rows[query]} → ${columns[key]}`, `at most ${said(weightOf(pooled[query * size[1] + key]))}`]] }),
    h("p", { class: "ch-note" }, `Summarised: ${tokens.length} × ${n} units in ${size[0]} × ${size[1]} blocks, the largest weight of each.`));
  };
  const linked = whole || document_.links; // blocks have no links of their own
  show(linked ? state.way : 0);
  return [h("p", { class: "ch-note" }, `Layer ${layer}, head ${head}: ${patterns[layer][head]}${average}`),
    linked && choice("Display of the head", ["Matrix", "Links"], state.way, show), box].filter(Boolean);
};

// A head's links: every one of a short input, the strongest of a long one.
const linksOf = (document_, layer, head, whole) => {
  const { tokens, keys = tokens } = document_, n = keys.length, row = (query) => Array.from(whole.subarray(query * n, (query + 1) * n), (byte, key) => [query, key, weightOf(byte)]);
  const every = whole ? tokens.flatMap((_, query) => strongest(row(query), n <= 80 ? n : 4)) : kept(document_.links[layer][head]);
  const note = whole ? "Left attends to right. Point at a unit to show only its links." : `Left attends to right: the ${every.length} strongest links of ${n} units. Point at a unit to highlight its links.`;
  return h("div", null, h("p", { class: "ch-note" }, note),
    links({ left: tokens, right: keys, every, alone: whole ? (side, unit) => (side === 0 ? row(unit) : null) : null, names: ["Queries", "Keys"], verbs: ["attends to", "is attended to by"] }));
};

const strongest = (links, count) => links.sort((a, b) => b[2] - a[2]).slice(0, count);

const kept = ({ ends, weights }) => {
  const pairs = unpacked(ends);
  return Array.from(unpacked(weights), (byte, place) => [pairs[2 * place], pairs[2 * place + 1], weightOf(byte)]);
};

// Raw attention, rollout and flow of the row that is read: as a table of layers, and as a layered graph.
const depth = (document_) => {
  const kinds = Object.keys(document_.depth), box = h("div"), state = { kind: Math.max(0, kinds.indexOf("rollout")), way: 0 }, { keys = document_.tokens } = document_;
  const show = () => {
    const packed = document_.depth[kinds[state.kind]], values = packed.numbers ??= unpacked(packed), layers = packed.shape[0];
    if (state.way === 1) return box.replaceChildren(graph(document_, values, packed.full));
    const order = Array.from({ length: layers }, (_, row) => layers - 1 - row), n = keys.length;
    const turned = Float32Array.from({ length: values.length }, (_, place) => values[order[Math.floor(place / n)] * n + (place % n)]);
    // The unit whose row is read mostly keeps to itself, and would leave no colour for the others.
    const top = turned.reduce((most, share, place) => (place % n === document_.row && n > 1 ? most : Math.max(most, share)), 0) || packed.full;
    const beyond = turned.some((share) => share > top) ? `, which ${keys[document_.row]} itself exceeds` : "";
    box.replaceChildren(h("p", { class: "ch-note" }, `Full colour is ${number(top, 3)}${beyond}; colours are on a square-root scale.`),
      matrix({ rows: order.map((layer) => `layer ${layer}`), columns: keys, values: turned.map((share) => Math.sqrt(Math.max(0, share) / top)), full: 1, weights: true, label: `${kinds[state.kind]} by layer`, corner: "layer", room: 1000,
        words: order.map((_, row) => keys.map((__, unit) => number(turned[row * n + unit], 3))), told: (row, unit) => [[`layer ${order[row]}, ${keys[unit]}`, number(turned[row * n + unit], 3)]] }));
  };
  show();
  return h("div", { class: "ch-depth" }, h("div", { class: "ch-picks" },
    kinds.length > 1 ? choice("Measure", kinds, state.kind, (kind) => { state.kind = kind; show(); }) : h("span", null, kinds[0]),
    document_.graph && choice("Display", ["Table", "Graph"], 0, (way) => { state.way = way; show(); })), box);
};

// Layers from left to right; a dot is as large as its unit's share there, a line as strong as the mean of the heads.
const graph = (document_, values, full) => {
  const { units, links: every, of } = document_.graph, tokens = document_.tokens, n = tokens.length, layers = values.length / n;
  const ROW = 20, LEFT = 130, step = Math.max(70, Math.min(150, 820 / layers)), WIDE = LEFT + layers * step + 44, HIGH = units.length * ROW + 30;
  const canvas = h("canvas", { class: "ch-canvas", role: "img", "aria-label": "Layered graph of attention; the table has the same values" });
  const draw = () => {
    const scale = Math.max(1, devicePixelRatio * 1.5), home = canvas.parentElement;
    canvas.width = WIDE * scale;
    canvas.height = HIGH * scale;
    canvas.style.width = `${WIDE}px`;
    canvas.style.height = `${HIGH}px`;
    const context = canvas.getContext("2d"), y = (place) => 28 + (place + 0.5) * ROW, x = (layer) => LEFT + layer * step;
    context.scale(scale, scale);
    context.strokeStyle = styled(home, "--link");
    for (const [layer, query, key, weight] of every) {
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
    context.fillStyle = styled(home, "--ink");
    units.forEach((unit, place) => context.fillText(short(tokens[unit], 17), LEFT - 10, y(place)));
    context.fillStyle = styled(home, "--soft");
    context.textAlign = "center";
    for (let layer = 0; layer <= layers; layer++) context.fillText(layer ? `layer ${layer - 1}` : "input", x(layer), 10);
    context.fillStyle = styled(home, "--accent");
    for (let layer = 0; layer < layers; layer++) units.forEach((unit, place) => {
      context.beginPath();
      context.arc(x(layer + 1), y(place), 1.5 + 6 * Math.sqrt(Math.max(0, values[layer * n + unit]) / full), 0, 2 * Math.PI);
      context.fill();
    });
  };
  const frame = h("div", { class: "ch-scroll ch-tall", tabindex: 0, role: "region", "aria-label": "Layered graph" }, canvas);
  const seen = new ResizeObserver(() => { if (canvas.isConnected) { seen.disconnect(); draw(); } });
  seen.observe(frame);
  whenColoursChange(canvas, draw);
  const less = of > units.length ? ` Summarised: the ${units.length} of ${of} units with the largest values.` : "";
  return h("div", null, h("p", { class: "ch-note" }, `Lines: mean attention of each layer’s heads. Dots: the share of each unit in ${document_.row === null ? "all rows" : "the read-out row"}.${less}`), frame);
};
