// The form, rebuilt for each model from the server's description of it.
import { h } from "./assets/dom.js";
import { getJson } from "./api_client.js";

const byId = (name) => document.getElementById(name);
const PREDICTION = "";
export const NOT_READY_MESSAGE = "No model is ready: reload the page.";

export class Form {
  constructor(limits, showError) {
    this.limits = limits;
    this.showError = showError;
    this.modelInfo = null;
    this.modelLoaded = null; // a promise
    this.image = null;
    this.selectedMethods = new Set();  // none: the recommended one of the model
    this.sampleText = "";
    byId("model").addEventListener("change", () => this.selectModel(byId("model").value));
    byId("toggle-text-pair").addEventListener("click", () => this.showTextPair(byId("text-pair-field").hidden));
    byId("image-file").addEventListener("change", () => this.readImage(byId("image-file").files[0]));
    byId("use-example").addEventListener("change", () => this.showInputs());
    byId("remove-image").addEventListener("click", () => this.removeImage());
    byId("method-list").addEventListener("change", ({ target }) => this.toggleMethod(target));
    for (const name of ["text", "text-pair"]) byId(name).addEventListener("paste", (event) => this.limitPastedText(event));
    this.listenForDropsAndPastes();
  }

  listModels(models) {
    byId("model").replaceChildren(...models.map(({ name }) => h("option", { value: name }, name)));
  }

  async selectModel(name) {
    const url = `api/model?name=${encodeURIComponent(name)}`, isCurrent = () => byId("model").value === name;
    this.modelLoaded = this.loadModelInfo(`${url}&check_methods=false`, isCurrent);
    await this.modelLoaded;
    try {
      const checkedInfo = this.modelInfo?.name === name && await getJson(url);
      if (checkedInfo && this.modelInfo?.name === name) this.showMethods(checkedInfo.methods);
    } catch (error) {
      this.showError(error.message);
    }
  }

  async loadModelInfo(url, isCurrent) {
    try {
      const modelInfo = await getJson(url);
      if (isCurrent()) this.showModel(modelInfo); // otherwise another model was chosen meanwhile
    } catch (error) {
      if (!isCurrent()) return;
      this.modelInfo = null;
      this.showError(error.message);
    }
  }

  // Resolves when the form belongs to the model chosen last.
  async whenReady() {
    let latest;
    do { latest = this.modelLoaded; await latest; } while (latest !== this.modelLoaded);
    if (!this.modelInfo) throw new Error(NOT_READY_MESSAGE);
  }

  showModel(modelInfo) {
    const takesInput = (stream) => modelInfo.input_names.includes(stream);
    this.modelInfo = modelInfo;
    byId("model-summary").textContent = modelInfo.summary ?? modelInfo.model_class;
    byId("example-field").hidden = !modelInfo.has_examples;
    byId("use-example").checked = modelInfo.has_examples && !modelInfo.sample_text;
    byId("use-example").disabled = takesInput("regions");  // the page has no input for regions
    if (byId("text").value === this.sampleText) byId("text").value = modelInfo.sample_text ?? "";
    this.sampleText = modelInfo.sample_text ?? "";
    this.showTextPair(false);
    this.showInputs();
    byId("target-field").hidden = modelInfo.labels?.length === 1;
    byId("label-target").hidden = modelInfo.labels === null;
    byId("token-target").hidden = modelInfo.labels !== null;
    byId("position").parentElement.hidden = !modelInfo.is_generative;
    const makeOptions = (firstLabel) => [h("option", { value: PREDICTION }, firstLabel), ...(modelInfo.labels ?? []).map((label, index) => h("option", { value: index }, label))];
    byId("target-label").replaceChildren(...makeOptions("the prediction"));
    byId("contrast-label").replaceChildren(...makeOptions("–"));
    for (const name of ["target-token", "contrast-token"]) byId(name).value = "";
    this.showMethods(modelInfo.methods);
  }

  showInputs() {
    if (!this.modelInfo) return;  // the model chosen last could not be opened
    const isOwnInput = !(this.modelInfo.has_examples && byId("use-example").checked), { input_names: inputNames } = this.modelInfo;
    byId("text-field").hidden = !(isOwnInput && inputNames.includes("text"));
    byId("image-field").hidden = !(isOwnInput && inputNames.includes("image"));
  }

  showMethods(methods) {
    const list = byId("method-list"), scrollTop = list.scrollTop;
    const isSelected = ({ name, is_recommended }) => (this.selectedMethods.size ? this.selectedMethods.has(name) : is_recommended);
    const selected = methods.filter(isSelected);
    list.replaceChildren(...[...new Set([...selected, ...methods])].map((method) => {
      const isUnavailable = method.applies === false;
      const checkbox = h("input", { type: "checkbox", value: method.name, disabled: isUnavailable, "aria-label": `${method.name}, ${isUnavailable ? `does not apply: ${method.why_not}` : method.short_cost}` });
      checkbox.checked = !isUnavailable && isSelected(method);
      return h("label", { title: isUnavailable ? method.why_not : [`Costs ${method.cost}.`, method.guidance, method.note].filter(Boolean).join(" ") },
        checkbox, h("span", { class: isUnavailable ? "unavailable" : "" }, method.is_recommended ? `${method.name} (recommended)` : method.name), h("span", { class: "cost" }, isUnavailable ? "does not apply" : method.short_cost));
    }));
    list.scrollTop = scrollTop;
    this.showMethodCount();
  }

  toggleMethod(checkbox) {
    this.selectedMethods = new Set(this.methods);
    this.showMethodCount();
  }

  get methods() {
    return [...byId("method-list").querySelectorAll("input:checked")].map((checkbox) => checkbox.value);
  }

  showMethodCount() {
    const count = this.methods.length;
    byId("method-count").textContent = count > 1 ? `– ${count} selected, to be compared` : "– select several to compare them";
  }

  showTextPair(isShown) {
    byId("text-pair-field").hidden = !isShown;
    byId("toggle-text-pair").textContent = isShown ? "Remove the second text" : "Add a second text";
    byId("toggle-text-pair").setAttribute("aria-expanded", String(isShown));
    if (!isShown) byId("text-pair").value = "";
  }

  // Rejects a far too long text, which would block the browser before the server could reject it.
  limitPastedText(event) {
    const { value, selectionStart, selectionEnd } = event.target, { max_text_characters: characters } = this.limits;
    const length = value.length - (selectionEnd - selectionStart) + event.clipboardData.getData("text/plain").length;
    if (length <= characters) return;
    event.preventDefault();
    const formatCount = (count) => count.toLocaleString("en");
    this.showError(`The text would have ${formatCount(length)} characters, but at most ${formatCount(characters)} are accepted: shorten it, or explain it with clearhead explain.`);
  }

  listenForDropsAndPastes() {
    const highlightDropArea = (isShown) => byId("drop-area").classList.toggle("drag-over", isShown);
    addEventListener("dragover", (event) => { event.preventDefault(); highlightDropArea(true); });
    addEventListener("dragleave", (event) => { if (!event.relatedTarget) highlightDropArea(false); });
    addEventListener("drop", (event) => {
      event.preventDefault();
      highlightDropArea(false);
      const [file] = event.dataTransfer.files;
      if (file && !file.type.startsWith("image/")) this.onSavedFile?.(file);
      else if (file) this.readImage(file);
    });
    addEventListener("paste", (event) => {
      const file = [...event.clipboardData.files].find(({ type }) => type.startsWith("image/"));
      if (file) { event.preventDefault(); this.readImage(file); }
    });
  }

  async readImage(file) {
    if (!file) return;
    try { await this.whenReady(); } catch (error) { return this.showError(error.message); }
    if (!this.modelInfo.input_names.includes("image") || this.modelInfo.input_names.includes("regions")) return this.showError(`${this.modelInfo.name} takes no images: choose one that does, such as zoo:pets.`);
    if (file.size > this.limits.max_image_bytes) return this.showError(`The image is too large: at most ${this.limits.max_image_bytes / 2 ** 20} MiB are accepted.`);
    this.image = await new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.addEventListener("load", () => resolve(reader.result));
      reader.addEventListener("error", () => reject(reader.error));
      reader.readAsDataURL(file);
    });
    byId("preview").src = this.image;
    byId("preview").alt = `The image to explain: ${file.name}`;
    byId("drop-hint").textContent = file.name;
    byId("use-example").checked = false;
    this.showInputs();
    for (const name of ["preview", "remove-image"]) byId(name).hidden = false;
  }

  removeImage() {
    this.image = null;
    byId("image-file").value = "";
    byId("drop-hint").textContent = "Drop an image here, paste one, or choose a file.";
    for (const name of ["preview", "remove-image"]) byId(name).hidden = true;
  }

  // The input without target and methods, for the attention view.
  buildInput() {
    const { name, input_names: inputNames, has_examples: hasExamples } = this.modelInfo;
    if (hasExamples && byId("use-example").checked) return { model: name, example: Number(byId("example").value) };
    const input = { model: name };
    if (inputNames.includes("text")) input.text = byId("text").value;
    if (inputNames.includes("text") && !byId("text-pair-field").hidden) input.text_pair = byId("text-pair").value;
    if (inputNames.includes("image") && this.image) input.image = this.image.slice(this.image.indexOf(",") + 1);
    return input;
  }

  buildRequest() {
    const request = { ...this.buildInput(), methods: this.methods };
    const parseLabel = (value) => (value === PREDICTION ? null : Number(value));
    if (this.modelInfo.labels !== null) return { ...request, target: parseLabel(byId("target-label").value), against: parseLabel(byId("contrast-label").value) };
    const getToken = (name) => byId(name).value.trim() || null;
    return { ...request, target: getToken("target-token"), against: getToken("contrast-token"), position: (this.modelInfo.is_generative && byId("position").value) || null };
  }

  // Sets another class of the same input as the target.
  selectTarget({ label, index }) {
    if (this.modelInfo.labels !== null && byId("target-label").options[index + 1]) {
      byId("target-label").value = String(index);
      if (byId("contrast-label").value === String(index)) byId("contrast-label").value = PREDICTION;
    } else {
      byId("target-token").value = label;
      if (byId("contrast-token").value.trim() === label) byId("contrast-token").value = "";
    }
  }
}
