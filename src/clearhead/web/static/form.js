// The form, rebuilt for each model from the server's description of it.
import { h } from "./assets/dom.js";
import { get } from "./api_client.js";

const id = (name) => document.getElementById(name);
const PREDICTED = "";
export const NOT_READY = "No model is ready: reload the page.";

export class Form {
  constructor(limits, complain) {
    this.limits = limits;
    this.complain = complain;
    this.about = null;
    this.ready = null; // a promise
    this.picture = null;
    this.chosen = new Set(["generic"]);
    this.sample = "";
    id("model").addEventListener("change", () => this.choose(id("model").value));
    id("add-pair").addEventListener("click", () => this.showPair(id("pairs").hidden));
    id("file").addEventListener("change", () => this.take(id("file").files[0]));
    id("use-example").addEventListener("change", () => this.showInputs());
    id("no-picture").addEventListener("click", () => this.drop());
    id("method-list").addEventListener("change", ({ target }) => this.tick(target));
    for (const name of ["text", "pair"]) id(name).addEventListener("paste", (event) => this.bound(event));
    this.listenToDrops();
  }

  list(models) {
    id("model").replaceChildren(...models.map(({ name }) => h("option", { value: name }, name)));
  }

  async choose(name) {
    const address = `api/model?name=${encodeURIComponent(name)}`, current = () => id("model").value === name;
    this.ready = this.open(`${address}&check_methods=false`, current);
    await this.ready;
    try {
      const tried = this.about?.name === name && await get(address);
      if (tried && this.about?.name === name) this.showMethods(tried.methods);
    } catch (problem) {
      this.complain(problem.message);
    }
  }

  async open(address, current) {
    try {
      const about = await get(address);
      if (current()) this.show(about); // otherwise another model was chosen meanwhile
    } catch (problem) {
      if (!current()) return;
      this.about = null;
      this.complain(problem.message);
    }
  }

  // Resolves when the form belongs to the model chosen last.
  async settled() {
    let last;
    do { last = this.ready; await last; } while (last !== this.ready);
    if (!this.about) throw new Error(NOT_READY);
  }

  show(about) {
    const takes = (stream) => about.input_names.includes(stream);
    this.about = about;
    id("about").textContent = about.summary ?? about.model_class;
    id("examples").hidden = !about.has_examples;
    id("use-example").checked = about.has_examples && !about.sample_text;
    id("use-example").disabled = takes("regions");  // the page has no input for regions
    if (id("text").value === this.sample) id("text").value = about.sample_text ?? "";
    this.sample = about.sample_text ?? "";
    this.showPair(false);
    this.showInputs();
    id("targets").hidden = about.labels?.length === 1;
    id("labels").hidden = about.labels === null;
    id("words").hidden = about.labels !== null;
    id("place").parentElement.hidden = !about.is_generative;
    const options = (first) => [h("option", { value: PREDICTED }, first), ...(about.labels ?? []).map((label, index) => h("option", { value: index }, label))];
    id("target").replaceChildren(...options("the prediction"));
    id("against").replaceChildren(...options("–"));
    for (const name of ["word", "other"]) id(name).value = "";
    this.showMethods(about.methods);
  }

  showInputs() {
    if (!this.about) return;  // the model chosen last could not be opened
    const own = !(this.about.has_examples && id("use-example").checked), { input_names: inputNames } = this.about;
    id("texts").hidden = !(own && inputNames.includes("text"));
    id("pictures").hidden = !(own && inputNames.includes("image"));
  }

  showMethods(methods) {
    const list = id("method-list"), top = list.scrollTop;
    const first = methods.filter(({ name }) => this.chosen.has(name));
    list.replaceChildren(...[...new Set([...first, ...methods])].map((method) => {
      const off = method.applies === false;
      const box = h("input", { type: "checkbox", value: method.name, disabled: off, "aria-label": `${method.name}, ${off ? `does not apply: ${method.why_not}` : method.short_cost}` });
      box.checked = !off && this.chosen.has(method.name);
      return h("label", { title: off ? method.why_not : [method.cost, method.note].filter(Boolean).join(". ") },
        box, h("span", { class: off ? "off" : "" }, method.name), h("span", { class: "cost" }, off ? "does not apply" : method.short_cost));
    }));
    list.scrollTop = top;
    this.count();
  }

  tick(box) {
    if (box.checked) this.chosen.add(box.value);
    else this.chosen.delete(box.value);
    this.count();
  }

  get methods() {
    return [...id("method-list").querySelectorAll("input:checked")].map((box) => box.value);
  }

  count() {
    const count = this.methods.length;
    id("chosen").textContent = count > 1 ? `– ${count}, will be compared` : "– tick several to compare them";
  }

  showPair(shown) {
    id("pairs").hidden = !shown;
    id("add-pair").textContent = shown ? "Remove the second text" : "Add a second text";
    id("add-pair").setAttribute("aria-expanded", String(shown));
    if (!shown) id("pair").value = "";
  }

  // Rejects a far too long text, which would block the browser before the server could reject it.
  bound(event) {
    const { value, selectionStart, selectionEnd } = event.target, { max_text_characters: characters } = this.limits;
    const length = value.length - (selectionEnd - selectionStart) + event.clipboardData.getData("text/plain").length;
    if (length <= characters) return;
    event.preventDefault();
    const said = (count) => count.toLocaleString("en");
    this.complain(`The text would have ${said(length)} characters, and at most ${said(characters)} are accepted: shorten it, or explain it with clearhead explain.`);
  }

  listenToDrops() {
    const over = (shown) => id("drop").classList.toggle("over", shown);
    addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
    addEventListener("dragleave", (event) => { if (!event.relatedTarget) over(false); });
    addEventListener("drop", (event) => {
      event.preventDefault();
      over(false);
      const [file] = event.dataTransfer.files;
      if (file && !file.type.startsWith("image/")) this.onSaved?.(file);
      else if (file) this.take(file);
    });
    addEventListener("paste", (event) => {
      const file = [...event.clipboardData.files].find(({ type }) => type.startsWith("image/"));
      if (file) { event.preventDefault(); this.take(file); }
    });
  }

  async take(file) {
    if (!file) return;
    try { await this.settled(); } catch (problem) { return this.complain(problem.message); }
    if (!this.about.input_names.includes("image") || this.about.input_names.includes("regions")) return this.complain(`${this.about.name} takes no images: choose one that does, such as zoo:pets.`);
    if (file.size > this.limits.max_image_bytes) return this.complain(`The image is too large: at most ${this.limits.max_image_bytes / 2 ** 20} MiB are accepted.`);
    this.picture = await new Promise((done, fail) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => done(reader.result));
      reader.addEventListener("error", () => fail(reader.error));
      reader.readAsDataURL(file);
    });
    id("preview").src = this.picture;
    id("preview").alt = `The image to explain: ${file.name}`;
    id("drop-words").textContent = file.name;
    id("use-example").checked = false;
    this.showInputs();
    for (const name of ["preview", "no-picture"]) id(name).hidden = false;
  }

  drop() {
    this.picture = null;
    id("file").value = "";
    id("drop-words").textContent = "Drop an image here, paste one, or choose a file.";
    for (const name of ["preview", "no-picture"]) id(name).hidden = true;
  }

  // The input without target and methods, for the attention view.
  input() {
    const { name, input_names: inputNames, has_examples: hasExamples } = this.about;
    if (hasExamples && id("use-example").checked) return { model: name, example: Number(id("example").value) };
    const given = { model: name };
    if (inputNames.includes("text")) given.text = id("text").value;
    if (inputNames.includes("text") && !id("pairs").hidden) given.text_pair = id("pair").value;
    if (inputNames.includes("image") && this.picture) given.image = this.picture.slice(this.picture.indexOf(",") + 1);
    return given;
  }

  ask() {
    const asked = { ...this.input(), methods: this.methods };
    const number = (value) => (value === PREDICTED ? null : Number(value));
    if (this.about.labels !== null) return { ...asked, target: number(id("target").value), against: number(id("against").value) };
    const word = (name) => id(name).value.trim() || null;
    return { ...asked, target: word("word"), against: word("other"), position: (this.about.is_generative && id("place").value) || null };
  }

  // Sets another class of the same input as the target.
  aim({ label, index }) {
    if (this.about.labels !== null && id("target").options[index + 1]) {
      id("target").value = String(index);
      if (id("against").value === String(index)) id("against").value = PREDICTED;
    } else {
      id("word").value = label;
      if (id("other").value.trim() === label) id("other").value = "";
    }
  }
}
