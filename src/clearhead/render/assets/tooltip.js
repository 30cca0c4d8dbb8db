// Tooltip of the element under the pointer or the keyboard cursor, and a live region for screen readers; the cursor itself.
import { h } from "./dom.js";

const findTooltip = (element) => {
  const root = element.closest(".clearhead") ?? document.body;
  let tooltip = root.querySelector(":scope > .ch-tooltip");
  if (!tooltip) {
    tooltip = h("div", { class: "ch-tooltip", "aria-hidden": "true", hidden: true });
    root.append(tooltip, h("div", { class: "ch-live-region", role: "status" }));
  }
  return tooltip;
};

// lines: [[label, value], …]; anchor: a point or a rectangle in the window.
export const showTooltip = (element, lines, anchor, announce = false) => {
  const tooltip = findTooltip(element);
  tooltip.replaceChildren(...lines.map(([label, value]) => h("p", null, h("bdi", null, label), value && h("b", null, value))));
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const right = anchor.right ?? anchor.x, bottom = anchor.bottom ?? anchor.y, top = anchor.top ?? anchor.y;
  const fitsBelow = bottom + 10 + height < innerHeight;
  const left = Math.max(4, Math.min((anchor.left ?? right) + (anchor.left === undefined ? 12 : 0), innerWidth - width - 4));
  tooltip.style.setProperty("left", `${left}px`);
  tooltip.style.setProperty("top", `${fitsBelow ? bottom + 8 : Math.max(4, top - height - 8)}px`);
  if (announce) tooltip.nextElementSibling.textContent = lines.map((line) => line.filter(Boolean).join(": ")).join("; ");
};

export const hideTooltip = (element) => { findTooltip(element).hidden = true; };

// Arrow keys move a cursor over a grid of rows and columns; Home and End go to the first and last column, Escape leaves.
// getSize(): [rows, columns]; onMove(row, column); onLeave(); onEnter(row, column).
export const addKeyboardCursor = (element, getSize, onMove, onLeave, onEnter) => {
  let row = 0, column = 0;
  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  element.addEventListener("keydown", (event) => {
    const [rows, columns] = getSize();
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return onLeave();
    if (onEnter && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); return onEnter(row, column); }
    if (event.key === "Home") column = 0;
    else if (event.key === "End") column = columns - 1;
    else if (MOVES[event.key]) {
      const [rowStep, columnStep] = rows === 1 ? [0, MOVES[event.key][0] + MOVES[event.key][1]] : MOVES[event.key];
      row = Math.max(0, Math.min(rows - 1, row + rowStep));
      column = Math.max(0, Math.min(columns - 1, column + columnStep));
    } else return;
    event.preventDefault();
    onMove(row, column);
  });
  element.addEventListener("blur", onLeave);
  return (newRow, newColumn) => { row = newRow; column = newColumn; };
};
