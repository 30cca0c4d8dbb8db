// History of this visit: kept in memory, gone when the page is closed.
import { h } from "./assets/dom.js";

const MAX_ENTRIES = 50;

export class ResultHistory {
  constructor(list, compareButton, onSelect) {
    Object.assign(this, { list, compareButton, onSelect, entries: [], current: null, selected: new Set() });
  }

  add(entry) {
    this.entries.unshift(entry);
    for (const dropped of this.entries.splice(MAX_ENTRIES)) this.selected.delete(dropped);
    this.setCurrent(entry);
  }

  setCurrent(entry) {
    this.current = entry;
    this.render();
  }

  render() {
    this.list.replaceChildren(...this.entries.map((entry) => this.makeListItem(entry)));
    this.compareButton.hidden = this.selected.size < 2;
  }

  makeListItem(entry) {
    const checkbox = h("input", { type: "checkbox", "aria-label": `Side by side: ${entry.title}, ${entry.detail}`, change: () => {
      this.selected[checkbox.checked ? "add" : "delete"](entry);
      this.compareButton.hidden = this.selected.size < 2;
    } });
    checkbox.checked = this.selected.has(entry);
    return h("li", null, checkbox, h("button", { type: "button", "aria-current": String(entry === this.current), click: () => { this.setCurrent(entry); this.onSelect(entry); } },
      h("b", null, entry.title), entry.detail));
  }

  get selectedEntries() {
    return this.entries.filter((entry) => this.selected.has(entry)).reverse();
  }
}
