// Entry point of the page: sends requests, handles events, shows results.
import { draw } from "./assets/clearhead.js";
import { Form, NOT_READY_MESSAGE } from "./form.js";
import { Result, parseSavedPage } from "./result.js";
import { ResultHistory } from "./history.js";
import { getBytes, getJson, openSavedFile, postJson, streamExplanations } from "./api_client.js";

const byId = (name) => document.getElementById(name);
let form, activeController = null;

const showStatus = (text) => { byId("status").textContent = text; };
const showError = (text) => {
  byId("error").hidden = !text;
  byId("error").textContent = text ?? "";
  if (text) byId("error").scrollIntoView({ block: "nearest" });
};
const withErrorMessage = (action) => async (...args) => {
  try {
    showError(null);
    await action(...args);
  } catch (error) {
    if (error.name !== "AbortError") showError(error.message);
  }
};

const showResult = (result) => {
  byId("empty-hint").hidden = true;
  byId("result-actions").hidden = result.explanations.length === 0;
  showError(result.errorText);
  const modelInfo = form?.modelInfo; // none as long as the description of the model is loading
  const canExplainLabels = Boolean(modelInfo) && result.request?.model === modelInfo.name && modelInfo.labels?.length !== 1;
  result.renderInto(byId("result-view"), canExplainLabels && ((label) => { form.selectTarget(label); explain(); }));
  byId("attention-view").hidden = result.attentionView === null;
  if (result.attentionView) draw(byId("attention-view"), result.attentionView, { fetchHeadMap: result.fetchHeadMap });
};
const resultHistory = new ResultHistory(byId("history"), byId("show-side-by-side"), (result) => { showStatus(""); showResult(result); });

const showProgress = (fraction) => {
  if (fraction === null) byId("progress-bar").removeAttribute("value");
  else byId("progress-bar").value = fraction;
};

// Handles the events of a stream: updates the result and the status line.
const makeEventHandler = (result, numMethods) => {
  let numDone = 0;
  return (event) => {
    switch (event.event) {
      case "busy": return showStatus(`The queue is full: trying again in ${event.seconds} s …`);
      case "queued": return showStatus(event.num_before ? `Waiting: ${event.num_before} ${event.num_before === 1 ? "request is" : "requests are"} ahead of this one …` : "Starting …");
      case "started": return showStatus(`${event.methods.join(", ")} …`);
      case "progress":
        showProgress((numDone + Math.min(1, event.num_inputs / event.expected_inputs) * 0.95) / numMethods);
        return showStatus(`${event.methods.join(", ")}: ${Math.min(event.num_inputs, event.expected_inputs).toLocaleString("en")} of up to ${event.expected_inputs.toLocaleString("en")} inputs, ${event.elapsed_seconds.toFixed(1)} s …`);
      case "explanation":
        numDone += 1;
        showProgress(numDone / numMethods);
        return result.add(event.explanation, event.image);
      case "view":
        result.view = event.view;
        if (resultHistory.current === result || !resultHistory.entries.includes(result)) showResult(result); // unless another result is shown
        return;
      case "error":
      case "expired":
        numDone += event.methods?.length ?? 1;
        result.addError(event.message, event.methods);
        return showError(result.errorText);
      case "done": return showStatus(result.explanations.length ? `Done in ${event.elapsed_seconds.toFixed(1)} s.` : "");
    }
  };
};

const runCancellable = async (action) => {
  const controller = new AbortController();
  activeController?.abort();
  activeController = controller;
  byId("progress").hidden = false;
  byId("cancel").hidden = false;
  byId("results").setAttribute("aria-busy", "true");
  showProgress(null);
  try {
    await action(controller.signal);
  } catch (error) {
    if (error.name === "AbortError" && activeController === controller) showStatus("Cancelled.");
    throw error;
  } finally {
    if (activeController === controller) {
      activeController = null;
      byId("progress").hidden = true;
      byId("cancel").hidden = true;
      byId("results").removeAttribute("aria-busy");
    }
  }
};

const whenFormReady = async () => {
  await initialised;
  if (!form) throw new Error(NOT_READY_MESSAGE);
  await form.whenReady(); // the description of a model chosen just now may still be loading
};

const formatTitle = (request) => request.text?.trim() || (request.example === undefined ? "an image" : `example ${request.example}`);
const formatTarget = ({ target, against }) => {
  const formatLabel = (label) => form.modelInfo.labels?.[label] ?? label ?? "the prediction";
  return (target ?? against ?? null) === null ? "" : ` → ${formatLabel(target)}${(against ?? null) === null ? "" : `, not ${formatLabel(against)}`}`;
};

const explain = withErrorMessage(async () => {
  await whenFormReady();
  const request = form.buildRequest();
  if (!request.methods.length) throw new Error("Select at least one method.");
  const result = new Result(formatTitle(request), `${request.model.replace("zoo:", "")}${formatTarget(request)} · ${request.methods.join(", ")}`, request);
  let isListed = false;
  const handleEvent = makeEventHandler(result, request.methods.length);
  showStatus("Starting …"); // at once, to replace the status of the previous result
  await runCancellable((signal) => streamExplanations(request, (event) => {
    handleEvent(event);
    if (event.event === "view" && !isListed) {
      isListed = true;
      resultHistory.add(result);
    }
  }, signal));
});

const showAttentionHeads = withErrorMessage(async () => {
  await whenFormReady();
  const input = form.buildInput();
  showStatus("Computing attention …");
  await runCancellable(async (signal) => {
    const { view, maps_key: mapsKey } = await postJson("api/attention", input, signal);
    let result = resultHistory.current;
    if (!result?.request || JSON.stringify(input) !== JSON.stringify(getInput(result.request))) {
      result = new Result(formatTitle(input), `${input.model.replace("zoo:", "")} · attention`);
      resultHistory.add(result);
    }
    result.attentionView = view;
    result.fetchHeadMap = mapsKey && ((layer, head, name = "") => getBytes(`api/heads/${mapsKey}?${new URLSearchParams({ layer, head, name })}`));
    showResult(result);
    showStatus("All heads of all layers are shown below.");
    byId("attention-view").scrollIntoView({ block: "start" });
  });
});
const getInput = ({ model, text, text_pair, image, example }) => JSON.parse(JSON.stringify(example === undefined ? { model, text, text_pair, image } : { model, example }));

const openFile = withErrorMessage(async (blob) => {
  if (!blob) return;
  const result = new Result(blob.name, "opened from a file");
  if (/\.html?$/i.test(blob.name)) {
    result.view = parseSavedPage(await blob.text());
    if (!result.view) throw new Error(`${blob.name} is not a page saved by clearhead, or it is damaged.`);
  } else {
    const saved = await openSavedFile(blob);
    saved.explanations.forEach((explanation, index) => result.add(explanation, saved.images[index]));
    result.view = saved.view;
  }
  resultHistory.add(result);
  showStatus(`Opened ${blob.name}.`);
  showResult(result);
});

const showSideBySide = withErrorMessage(async () => {
  const selected = resultHistory.selectedEntries;
  const result = new Result(selected.map(({ title }) => title).join(" | "), "side by side");
  for (const entry of selected) entry.explanations.forEach((explanation, index) => result.add(explanation, entry.images[index]));
  result.view = (await postJson("api/view", result.requestBody)).view;
  resultHistory.selected.clear();
  resultHistory.add(result);
  showResult(result);
});

const initialise = withErrorMessage(async () => {
  const [{ limits, version }, { models }] = await Promise.all([getJson("api/about"), getJson("api/models")]);
  byId("limits").textContent = `clearhead ${version}. Texts up to ${limits.max_text_characters.toLocaleString("en")} characters, images up to ${Math.round(limits.max_image_bytes / 2 ** 20)} MiB; a request may take at most ${limits.timeout_seconds} s.`;
  form = new Form(limits, showError);
  form.onSavedFile = openFile;
  form.listModels(models);
  form.selectModel(models[0].name);
});

byId("explain-form").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
byId("cancel").addEventListener("click", () => activeController?.abort());
byId("show-heads").addEventListener("click", showAttentionHeads);
byId("saved-file").addEventListener("change", async () => { await openFile(byId("saved-file").files[0]); byId("saved-file").value = ""; });
byId("show-side-by-side").addEventListener("click", showSideBySide);
byId("save-page").addEventListener("click", withErrorMessage(() => resultHistory.current.savePage()));
byId("save-data").addEventListener("click", withErrorMessage(() => resultHistory.current.saveData()));
addEventListener("keydown", (event) => {
  if (event.key === "Escape") activeController?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); explain(); }
});
const initialised = initialise();
