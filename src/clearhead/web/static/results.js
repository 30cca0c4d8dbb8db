// One result: the explanations so far, their view, and the files they are saved to.
import { draw } from "./assets/clearhead.js";
import { file } from "./api_client.js";

export class Result {
  constructor(title, detail, ask = null) {
    Object.assign(this, { title, detail, ask, explanations: [], images: [], problems: new Map(), view: null, heads: null, tile: null });
  }

  take(explanation, image) {
    this.explanations.push(explanation);
    this.images.push(image === undefined ? this.images[0] ?? null : image);
  }

  // A message that several methods share is shown once.
  trouble(message, methods = []) {
    this.problems.set(message, [...(this.problems.get(message) ?? []), ...methods]);
  }

  get troubles() {
    return [...this.problems].map(([message, methods]) => (methods.length ? `${methods.join(", ")}: ${message}` : message)).join("\n");
  }

  get shown() {
    return { explanations: this.explanations, images: this.images };
  }

  drawInto(element, onLabel) {
    if (this.view === null) element.replaceChildren();
    else draw(element, this.view, { onLabel });
  }

  async savePage() {
    save(await file("api/export", { ...this.shown, format: "html" }), `${this.name}.html`);
  }

  async saveData() {
    if (this.explanations.length === 1) {
      save(await file("api/export", { ...this.shown, format: "safetensors" }), `${this.name}.safetensors`);
      return;
    }
    const all = { schema: "clearhead/explanations", version: 1, ...this.shown };
    save(new Blob([JSON.stringify(all)], { type: "application/json" }), `${this.name}.json`);
  }

  get name() {
    return `why ${this.title}`.replace(/[^\p{L}\p{N} -]/gu, "").trim().slice(0, 40).trim().replace(/ +/g, "-") || "why";
  }
}

const save = (blob, name) => {
  const address = URL.createObjectURL(blob), link = document.createElement("a");
  Object.assign(link, { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
};

// The view model of a saved page, if it can be drawn: only its data is read, no script of it runs.
export const documentIn = (html) => {
  const [, data] = /<script\b[^>]*\bclass="?ch-data\b[^>]*>([^<]*)<\/script>/.exec(html) ?? [];
  try {
    const found = JSON.parse(data);
    draw(document.createElement("div"), found);
    return found;
  } catch {
    return null;
  }
};
