// What is said about the thing under the pointer or the keyboard's cursor: a note beside it, and a line for readers.
import { h } from "./dom.js";

const noteOf = (element) => {
  const root = element.closest(".clearhead") ?? document.body;
  let note = root.querySelector(":scope > .ch-tip");
  if (!note) {
    note = h("div", { class: "ch-tip", "aria-hidden": "true", hidden: true });
    root.append(note, h("div", { class: "ch-said", role: "status" }));
  }
  return note;
};

// lines: [[what, how much], …]; at: a point or the rectangle of the thing, in the window.
export const tell = (element, lines, at, aloud = false) => {
  const note = noteOf(element);
  note.replaceChildren(...lines.map(([what, much]) => h("p", null, h("bdi", null, what), much && h("b", null, much))));
  note.hidden = false;
  const { width, height } = note.getBoundingClientRect();
  const right = at.right ?? at.x, bottom = at.bottom ?? at.y, top = at.top ?? at.y;
  const below = bottom + 10 + height < innerHeight;
  const left = Math.max(4, Math.min((at.left ?? right) + (at.left === undefined ? 12 : 0), innerWidth - width - 4));
  note.style.setProperty("left", `${left}px`);
  note.style.setProperty("top", `${below ? bottom + 8 : Math.max(4, top - height - 8)}px`);
  if (aloud) note.nextElementSibling.textContent = lines.map((line) => line.filter(Boolean).join(": ")).join("; ");
};

export const hush = (element) => { noteOf(element).hidden = true; };

// Arrow keys move a cursor over things laid out in rows and columns; Home and End go to the ends, Escape leaves.
// size(): [rows, columns]; at(row, column): shows the place; leave(): shows none; enter(row, column): chooses it.
export const cursor = (element, size, at, leave, enter) => {
  let row = 0, column = 0;
  const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  element.addEventListener("keydown", (event) => {
    const [rows, columns] = size();
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") return leave();
    if (enter && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); return enter(row, column); }
    if (event.key === "Home") column = 0;
    else if (event.key === "End") column = columns - 1;
    else if (moves[event.key]) {
      const [down, across] = rows === 1 ? [0, moves[event.key][0] + moves[event.key][1]] : moves[event.key];
      row = Math.max(0, Math.min(rows - 1, row + down));
      column = Math.max(0, Math.min(columns - 1, column + across));
    } else return;
    event.preventDefault();
    at(row, column);
  });
  element.addEventListener("blur", leave);
  return (newRow, newColumn) => { row = newRow; column = newColumn; };
};
