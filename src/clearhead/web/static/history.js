// History of this visit: kept in memory, gone when the page is closed.
import { h } from "./assets/dom.js";

const KEPT = 50;

export class Visit {
  constructor(list, beside, show) {
    Object.assign(this, { list, beside, show, entries: [], current: null, ticked: new Set() });
  }

  add(entry) {
    this.entries.unshift(entry);
    for (const gone of this.entries.splice(KEPT)) this.ticked.delete(gone);
    this.choose(entry);
  }

  choose(entry) {
    this.current = entry;
    this.draw();
  }

  draw() {
    this.list.replaceChildren(...this.entries.map((entry) => this.line(entry)));
    this.beside.hidden = this.ticked.size < 2;
  }

  line(entry) {
    const box = h("input", { type: "checkbox", "aria-label": `Side by side: ${entry.title}, ${entry.detail}`, change: () => {
      this.ticked[box.checked ? "add" : "delete"](entry);
      this.beside.hidden = this.ticked.size < 2;
    } });
    box.checked = this.ticked.has(entry);
    return h("li", null, box, h("button", { type: "button", "aria-current": String(entry === this.current), click: () => { this.choose(entry); this.show(entry); } },
      h("b", null, entry.title), entry.detail));
  }

  get together() {
    return this.entries.filter((entry) => this.ticked.has(entry)).reverse();
  }
}
