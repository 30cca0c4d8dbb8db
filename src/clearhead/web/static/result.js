// One result: the explanations so far, their view, and the files they are saved to.
import { draw } from "./assets/clearhead.js";
import { postForFile } from "./api_client.js";

export class Result {
  constructor(title, detail, request = null) {
    Object.assign(this, { title, detail, request, explanations: [], images: [], methodsByError: new Map(), view: null, attentionView: null, fetchHeadMap: null });
  }

  add(explanation, image) {
    this.explanations.push(explanation);
    this.images.push(image === undefined ? this.images[0] ?? null : image);
  }

  // A message that several methods share is shown once.
  addError(message, methods = []) {
    this.methodsByError.set(message, [...(this.methodsByError.get(message) ?? []), ...methods]);
  }

  get errorText() {
    return [...this.methodsByError].map(([message, methods]) => (methods.length ? `${methods.join(", ")}: ${message}` : message)).join("\n");
  }

  get requestBody() {
    return { explanations: this.explanations, images: this.images };
  }

  renderInto(element, onLabel) {
    if (this.view === null) element.replaceChildren();
    else draw(element, this.view, { onLabel });
  }

  async savePage() {
    save(await postForFile("api/export", { ...this.requestBody, format: "html" }), `${this.name}.html`);
  }

  async saveData() {
    if (this.explanations.length === 1) {
      save(await postForFile("api/export", { ...this.requestBody, format: "safetensors" }), `${this.name}.safetensors`);
      return;
    }
    const savedResults = { schema: "clearhead/explanations", version: 1, ...this.requestBody };
    save(new Blob([JSON.stringify(savedResults)], { type: "application/json" }), `${this.name}.json`);
  }

  get name() {
    return `why ${this.title}`.replace(/[^\p{L}\p{N} -]/gu, "").trim().slice(0, 40).trim().replace(/ +/g, "-") || "why";
  }
}

const save = (blob, name) => {
  const url = URL.createObjectURL(blob), link = document.createElement("a");
  Object.assign(link, { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
};

// The view model of a saved page, if it can be drawn: only its data is read, no script of it runs.
export const parseSavedPage = (html) => {
  const [, data] = /<script\b[^>]*\bclass="?ch-data\b[^>]*>([^<]*)<\/script>/.exec(html) ?? [];
  try {
    const viewModel = JSON.parse(data);
    draw(document.createElement("div"), viewModel);
    return viewModel;
  } catch {
    return null;
  }
};
