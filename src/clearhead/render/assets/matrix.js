// A matrix of scores on a canvas: step × unit, layer × unit, layer × head, query × key. Small ones have row and column
// names and a table; in large ones a cell is one or two pixels, and a tooltip identifies it.
import { h, collapsible, scrollable } from "./dom.js";
import { formatAligned, formatNumber, truncate } from "./format.js";
import { isDarkTheme, toColourLevel, getPixelTable, resolveColour, redrawOnThemeChange } from "./colour.js";
import { INK_ON_DARK, INK_ON_LIGHT, LEVELS } from "./palette.js";
import { addKeyboardCursor, hideTooltip, showTooltip } from "./tooltip.js";

const FONT = "11px ui-sans-serif, system-ui, sans-serif";
const MIN_LABELLED_CELL = 9; // smallest cell in pixels whose row or column name is drawn
const MAX_TABLE_CELLS = 1500; // larger matrices have no table
const MAX_UNSCROLLED_HEIGHT = 720; // higher matrices scroll; lower ones are shown whole, because the last row would look cut off

const measureContext = document.createElement("canvas").getContext("2d");
const measureMaxWidth = (names) => {
  measureContext.font = FONT;
  return Math.ceil(Math.max(0, ...names.map((name) => measureContext.measureText(name).width)));
};

// options: rows, columns (names), values (row by row), vmax, label, maxWidth, maxCellSize, isSquare, isUnsigned (0 to 1),
// getTooltip(row, column): lines of the tooltip, onSelectRow(row), selectedRow: has a frame, marks: cells with a dot,
// texts: of the cells, instead of numbers, showTexts: draws them into the cells, rowAxis: what the rows are, hasTable
export const matrix = (options) => {
  const { rows, columns, values, vmax, label, maxWidth = 660, maxCellSize = 24, onSelectRow, isUnsigned = false } = options;
  const rowNames = rows.map((name) => truncate(name, 20)), columnNames = columns.map((name) => truncate(name, 18));
  const nameWidth = measureMaxWidth(rowNames) + 10;
  let cellWidth = Math.max(1, Math.min(maxCellSize, Math.floor((maxWidth - nameWidth) / columns.length)));
  let cellHeight = Math.max(1, Math.min(maxCellSize, Math.floor(480 / rows.length)));
  if (options.isSquare) cellWidth = cellHeight = Math.min(cellWidth, Math.max(cellHeight, MIN_LABELLED_CELL));
  const hasRows = cellHeight >= MIN_LABELLED_CELL, hasColumns = cellWidth >= MIN_LABELLED_CELL;
  const left = hasRows ? nameWidth : 4, top = hasColumns ? measureMaxWidth(columnNames) + 10 : 4;
  const width = left + cellWidth * columns.length + 2, height = top + cellHeight * rows.length + 2;
  const canvas = h("canvas", { class: "ch-canvas", role: "img", "aria-label": describeMatrix(options) });
  const selectedRow = options.selectedRow ?? null;
  let hoveredCell = null;

  const draw = () => {
    const isDark = isDarkTheme(canvas), scale = Math.max(1, Math.min(devicePixelRatio * 1.5, 4096 / Math.max(width, height)));
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.imageSmoothingEnabled = false;
    context.drawImage(renderCells(values, rows.length, columns.length, vmax, isDark, isUnsigned), left, top, cellWidth * columns.length, cellHeight * rows.length);
    const textColour = resolveColour(canvas.parentElement, "--ink"), mutedColour = resolveColour(canvas.parentElement, "--soft");
    const accentColour = resolveColour(canvas.parentElement, "--accent");
    if (Math.min(cellWidth, cellHeight) >= 7) drawGrid(context, resolveColour(canvas.parentElement, "--paper"));
    context.font = FONT;
    context.textBaseline = "middle";
    if (hasRows) rowNames.forEach((name, row) => {
      context.fillStyle = row === selectedRow || row === hoveredCell?.[0] ? accentColour : mutedColour;
      context.textAlign = "right";
      context.fillText(name, left - 6, top + (row + 0.5) * cellHeight);
    });
    if (hasColumns) columnNames.forEach((name, column) => {
      context.save();
      context.translate(left + (column + 0.5) * cellWidth, top - 5);
      context.rotate(-Math.PI / 2);
      context.fillStyle = column === hoveredCell?.[1] ? accentColour : mutedColour;
      context.textAlign = "left";
      context.fillText(name, 0, 0);
      context.restore();
    });
    if (options.showTexts && cellWidth >= 34 && cellHeight >= 14) drawTexts(context, isDark);
    context.fillStyle = textColour;
    for (const [row, column] of options.marks ?? []) {
      context.beginPath();
      context.arc(left + (column + 0.5) * cellWidth, top + (row + 0.5) * cellHeight, Math.max(1.5, Math.min(cellWidth, cellHeight) / 6), 0, 2 * Math.PI);
      context.fill();
    }
    context.lineWidth = 1.5;
    if (selectedRow !== null) {
      context.strokeStyle = accentColour;
      context.strokeRect(left, top + selectedRow * cellHeight, cellWidth * columns.length, cellHeight);
    }
    if (hoveredCell) {
      context.strokeStyle = textColour;
      context.strokeRect(left + hoveredCell[1] * cellWidth - 0.5, top + hoveredCell[0] * cellHeight - 0.5, cellWidth + 1, cellHeight + 1);
    }
  };
  const drawTexts = (context, isDark) => {
    const textColours = isDark ? INK_ON_DARK : INK_ON_LIGHT;
    context.textAlign = "center";
    options.texts.forEach((rowTexts, row) => rowTexts.forEach((text, column) => {
      context.fillStyle = textColours[toColourLevel(values[row * columns.length + column], vmax) + LEVELS];
      context.fillText(text, left + (column + 0.5) * cellWidth, top + (row + 0.5) * cellHeight);
    }));
  };
  const drawGrid = (context, paper) => {
    context.strokeStyle = paper;
    context.lineWidth = 1;
    context.beginPath();
    for (let row = 0; row <= rows.length; row++) { context.moveTo(left, top + row * cellHeight); context.lineTo(width - 2, top + row * cellHeight); }
    for (let column = 0; column <= columns.length; column++) { context.moveTo(left + column * cellWidth, top); context.lineTo(left + column * cellWidth, height - 2); }
    context.stroke();
  };

  const getTooltipLines = (row, column) => options.getTooltip?.(row, column) ??
    [[`${rows[row]} ← ${columns[column]}`, formatNumber(values[row * columns.length + column], 3)]];
  const showCell = (row, column, announce) => {
    hoveredCell = [row, column];
    draw();
    const rect = canvas.getBoundingClientRect();
    const x = rect.left + left + column * cellWidth, y = rect.top + top + row * cellHeight;
    showTooltip(canvas, getTooltipLines(row, column), { left: x, right: x + cellWidth, top: y, bottom: y + cellHeight }, announce);
    options.onHover?.(row, column);
  };
  const clearSelection = () => {
    if (!hoveredCell) return;
    hoveredCell = null;
    draw();
    hideTooltip(canvas);
    options.onHover?.(null);
  };
  const findCell = (event) => {
    const column = Math.floor((event.offsetX - left) / cellWidth), row = Math.floor((event.offsetY - top) / cellHeight);
    const isInside = row >= 0 && row < rows.length && column < columns.length && (column >= 0 || (hasRows && onSelectRow));
    return isInside ? [row, Math.max(0, column)] : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const cell = findCell(event);
    if (!cell) clearSelection();
    else if (String(cell) !== String(hoveredCell)) { showCell(...cell); moveTo(...cell); }
  });
  canvas.addEventListener("pointerleave", clearSelection);
  const selectCell = (row, column) => { if (onSelectRow) onSelectRow(row, column); };
  canvas.addEventListener("click", (event) => { const cell = findCell(event); if (cell) selectCell(...cell); });
  const frame = scrollable(`${label}: arrow keys move from cell to cell${onSelectRow ? ", Enter chooses" : ""}`, canvas);
  if (height <= MAX_UNSCROLLED_HEIGHT) frame.classList.add("ch-unscrolled");
  const moveTo = addKeyboardCursor(frame, () => [rows.length, columns.length], (row, column) => showCell(row, column, true), clearSelection, onSelectRow && selectCell);
  // The canvas needs the colours of its page, so it is drawn once it is attached.
  const observer = new ResizeObserver(() => { if (canvas.isConnected) { observer.disconnect(); draw(); } });
  observer.observe(frame);
  redrawOnThemeChange(canvas, draw);
  if (options.hasTable === false || rows.length * columns.length > MAX_TABLE_CELLS) return frame;
  return h("div", null, frame, collapsible("Values as a table", () => makeTable(options)));
};

// One pixel for each cell, to be scaled up; unsigned weights use the blue half of the colour map.
export const renderCells = (values, rows, columns, vmax, isDark, isUnsigned = false) => {
  const canvas = h("canvas", { width: columns, height: rows });
  const context = canvas.getContext("2d"), imageData = context.createImageData(columns, rows);
  const pixels = new Uint32Array(imageData.data.buffer), palette = getPixelTable(isDark), sign = isUnsigned ? -1 : 1;
  for (let index = 0; index < pixels.length; index++) pixels[index] = palette[toColourLevel(sign * values[index], vmax) + LEVELS];
  context.putImageData(imageData, 0, 0);
  return canvas;
};

const describeMatrix = ({ label, rows, columns, values, texts }) => {
  let strongest = 0;
  for (let index = 1; index < values.length; index++) if (!(Math.abs(values[index]) <= Math.abs(values[strongest]))) strongest = index;
  const row = Math.floor(strongest / columns.length), column = strongest % columns.length;
  return `${label}, ${rows.length} × ${columns.length}; strongest: ${rows[row]}, ${columns[column]}: ${texts?.[row][column] ?? formatNumber(values[strongest], 3)}`;
};

const makeTable = ({ rows, columns, values, vmax, label, texts, rowAxis = "" }) =>
  scrollable(label, h("table", { class: "ch-matrix-table" },
    h("thead", null, h("tr", null, h("th", { scope: "col" }, rowAxis), columns.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", null, rows.map((name, row) => h("tr", null, h("th", { scope: "row" }, h("bdi", null, name)),
      columns.map((_, column) => h("td", null, texts?.[row][column] ?? formatAligned(values[row * columns.length + column], vmax))))))));
