// Rows × columns of scores on a canvas: step × unit, layer × unit, layer × head, query × key. Small ones have names and
// can be read as a table; large ones are one pixel or two for each cell, and the pointer says which it is.
import { h, folded, scrolled } from "./dom.js";
import { aligned, number, short } from "./format.js";
import { isDark, level, pixels, styled, whenColoursChange } from "./colour.js";
import { INK_ON_DARK, INK_ON_LIGHT, LEVELS } from "./palette.js";
import { cursor, hush, tell } from "./tip.js";

const FONT = "11px ui-sans-serif, system-ui, sans-serif";
const NAMED = 9; // names are written where cells are at least so large
const TABLE = 1500; // and with up to so many cells there is a table
const WHOLE = 720; // and up to so many pixels high it is shown whole, not scrolled: a last row would look cut off

const measure = document.createElement("canvas").getContext("2d");
const widthOf = (names) => {
  measure.font = FONT;
  return Math.ceil(Math.max(0, ...names.map((name) => measure.measureText(name).width)));
};

// given: rows, columns (names), values (row by row), full, label; room: how wide it may be; largest: of a cell
// told(row, column): the lines to say; choose(row): what a click does; chosen: the row that is framed; weights: 0 to 1
// marks: cells with a dot; words: what each cell says, where that is not its number; written: into it
export const matrix = (given) => {
  const { rows, columns, values, full, label, room = 660, largest = 24, choose, weights = false } = given;
  const rowNames = rows.map((name) => short(name, 20)), columnNames = columns.map((name) => short(name, 18));
  const left0 = widthOf(rowNames) + 10;
  let wide = Math.max(1, Math.min(largest, Math.floor((room - left0) / columns.length)));
  let high = Math.max(1, Math.min(largest, Math.floor(480 / rows.length)));
  if (given.square) wide = high = Math.min(wide, Math.max(high, NAMED));
  const hasRows = high >= NAMED, hasColumns = wide >= NAMED;
  const left = hasRows ? left0 : 4, top = hasColumns ? widthOf(columnNames) + 10 : 4;
  const width = left + wide * columns.length + 2, height = top + high * rows.length + 2;
  const canvas = h("canvas", { class: "ch-canvas", role: "img", "aria-label": described(given) });
  let chosen = given.chosen ?? null, pointed = null;

  const draw = () => {
    const dark = isDark(canvas), scale = Math.max(1, Math.min(devicePixelRatio * 1.5, 4096 / Math.max(width, height)));
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.imageSmoothingEnabled = false;
    context.drawImage(cells(values, rows.length, columns.length, full, dark, weights), left, top, wide * columns.length, high * rows.length);
    const ink = styled(canvas.parentElement, "--ink"), soft = styled(canvas.parentElement, "--soft");
    const accent = styled(canvas.parentElement, "--accent");
    if (Math.min(wide, high) >= 7) rule(context, styled(canvas.parentElement, "--paper"));
    context.font = FONT;
    context.textBaseline = "middle";
    if (hasRows) rowNames.forEach((name, row) => {
      context.fillStyle = row === chosen || row === pointed?.[0] ? accent : soft;
      context.textAlign = "right";
      context.fillText(name, left - 6, top + (row + 0.5) * high);
    });
    if (hasColumns) columnNames.forEach((name, column) => {
      context.save();
      context.translate(left + (column + 0.5) * wide, top - 5);
      context.rotate(-Math.PI / 2);
      context.fillStyle = column === pointed?.[1] ? accent : soft;
      context.textAlign = "left";
      context.fillText(name, 0, 0);
      context.restore();
    });
    if (given.written && wide >= 34 && high >= 14) write(context, dark);
    context.fillStyle = ink;
    for (const [row, column] of given.marks ?? []) {
      context.beginPath();
      context.arc(left + (column + 0.5) * wide, top + (row + 0.5) * high, Math.max(1.5, Math.min(wide, high) / 6), 0, 2 * Math.PI);
      context.fill();
    }
    context.lineWidth = 1.5;
    if (chosen !== null) {
      context.strokeStyle = accent;
      context.strokeRect(left, top + chosen * high, wide * columns.length, high);
    }
    if (pointed) {
      context.strokeStyle = ink;
      context.strokeRect(left + pointed[1] * wide - 0.5, top + pointed[0] * high - 0.5, wide + 1, high + 1);
    }
  };
  const write = (context, dark) => {
    const inks = dark ? INK_ON_DARK : INK_ON_LIGHT;
    context.textAlign = "center";
    given.words.forEach((own, row) => own.forEach((word, column) => {
      context.fillStyle = inks[level(values[row * columns.length + column], full) + LEVELS];
      context.fillText(word, left + (column + 0.5) * wide, top + (row + 0.5) * high);
    }));
  };
  const rule = (context, paper) => {
    context.strokeStyle = paper;
    context.lineWidth = 1;
    context.beginPath();
    for (let row = 0; row <= rows.length; row++) { context.moveTo(left, top + row * high); context.lineTo(width - 2, top + row * high); }
    for (let column = 0; column <= columns.length; column++) { context.moveTo(left + column * wide, top); context.lineTo(left + column * wide, height - 2); }
    context.stroke();
  };

  const lines = (row, column) => given.told?.(row, column) ??
    [[`${rows[row]} ← ${columns[column]}`, number(values[row * columns.length + column], 3)]];
  const point = (row, column, aloud) => {
    pointed = [row, column];
    draw();
    const box = canvas.getBoundingClientRect();
    const x = box.left + left + column * wide, y = box.top + top + row * high;
    tell(canvas, lines(row, column), { left: x, right: x + wide, top: y, bottom: y + high }, aloud);
    given.point?.(row, column);
  };
  const leave = () => {
    if (!pointed) return;
    pointed = null;
    draw();
    hush(canvas);
    given.point?.(null);
  };
  const place = (event) => {
    const column = Math.floor((event.offsetX - left) / wide), row = Math.floor((event.offsetY - top) / high);
    const inside = row >= 0 && row < rows.length && column < columns.length && (column >= 0 || (hasRows && choose));
    return inside ? [row, Math.max(0, column)] : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const at = place(event);
    if (!at) leave();
    else if (String(at) !== String(pointed)) { point(...at); moveTo(...at); }
  });
  canvas.addEventListener("pointerleave", leave);
  const pick = (row, column) => { if (choose) choose(row, column); };
  canvas.addEventListener("click", (event) => { const at = place(event); if (at) pick(...at); });
  const frame = scrolled(`${label}: arrow keys move from cell to cell${choose ? ", Enter chooses" : ""}`, canvas);
  if (height <= WHOLE) frame.classList.add("ch-tall");
  const moveTo = cursor(frame, () => [rows.length, columns.length], (row, column) => point(row, column, true), leave, choose && pick);
  // A canvas needs the colours of the page it stands in, so it is drawn once it stands there.
  const seen = new ResizeObserver(() => { if (canvas.isConnected) { seen.disconnect(); draw(); } });
  seen.observe(frame);
  whenColoursChange(canvas, draw);
  frame.choose = (row) => { chosen = row; draw(); };
  if (given.table === false || rows.length * columns.length > TABLE) return frame;
  return h("div", null, frame, folded("These figures as a table", () => table(given)));
};

// One pixel for each cell, to be scaled up; weights, which have no sign, take the blue side.
export const cells = (values, rows, columns, full, dark, weights = false) => {
  const canvas = h("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const made = new Uint32Array(image.data.buffer), table = pixels(dark), sign = weights ? -1 : 1;
  for (let place = 0; place < made.length; place++) made[place] = table[level(sign * values[place], full) + LEVELS];
  context.putImageData(image, 0, 0);
  return canvas;
};

const described = ({ label, rows, columns, values, words }) => {
  let best = 0;
  for (let place = 1; place < values.length; place++) if (!(Math.abs(values[place]) <= Math.abs(values[best]))) best = place;
  const row = Math.floor(best / columns.length), column = best % columns.length;
  return `${label}, ${rows.length} × ${columns.length}; strongest: ${rows[row]}, ${columns[column]}: ${words?.[row][column] ?? number(values[best], 3)}`;
};

const table = ({ rows, columns, values, full, label, words, corner = "" }) =>
  scrolled(label, h("table", { class: "ch-numbers" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, corner), columns.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, rows.map((name, row) => h("tr", null, h("th", { scope: "row" }, h("bdi", null, name)),
      columns.map((_, column) => h("td", null, words?.[row][column] ?? aligned(values[row * columns.length + column], full))))))));
