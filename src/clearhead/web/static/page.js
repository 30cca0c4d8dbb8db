// Entry point of the page: sends requests, handles events, shows results.
import { draw } from "./assets/clearhead.js";
import { Form, NOT_READY } from "./form.js";
import { Result, documentIn } from "./results.js";
import { Visit } from "./history.js";
import { bytes, get, opened, post, stream } from "./api_client.js";

const id = (name) => document.getElementById(name);
let form, running = null;

const say = (words) => { id("status").textContent = words; };
const complain = (words) => {
  id("problem").hidden = !words;
  id("problem").textContent = words ?? "";
  if (words) id("problem").scrollIntoView({ block: "nearest" });
};
const guarded = (work) => async (...given) => {
  try {
    complain(null);
    await work(...given);
  } catch (problem) {
    if (problem.name !== "AbortError") complain(problem.message);
  }
};

const show = (result) => {
  id("empty").hidden = true;
  id("tools").hidden = result.explanations.length === 0;
  complain(result.troubles);
  const aims = result.ask?.model === form?.about?.name && form.about.labels?.length !== 1;
  result.drawInto(id("view"), aims && ((label) => { form.aim(label); explain(); }));
  id("head-view").hidden = result.heads === null;
  if (result.heads) draw(id("head-view"), result.heads, { tile: result.tile });
};
const visit = new Visit(id("history"), id("beside"), (result) => { say(""); show(result); });

const progress = (part) => {
  if (part === null) id("bar").removeAttribute("value");
  else id("bar").value = part;
};

// Handles the events of a stream: updates the result and the status line.
const listener = (result, total) => {
  let done = 0;
  return (event) => {
    switch (event.event) {
      case "busy": return say(`The queue is full: trying again in ${event.seconds} s …`);
      case "queued": return say(event.num_before ? `Waiting; ${event.num_before} before this one …` : "Starting …");
      case "started": return say(`${event.methods.join(", ")} …`);
      case "progress":
        progress((done + Math.min(1, event.num_inputs / event.expected_inputs) * 0.95) / total);
        return say(`${event.methods.join(", ")}: ${Math.min(event.num_inputs, event.expected_inputs).toLocaleString("en")} of up to ${event.expected_inputs.toLocaleString("en")}, ${event.elapsed_seconds.toFixed(1)} s …`);
      case "explanation":
        done += 1;
        progress(done / total);
        return result.take(event.explanation, event.image);
      case "view":
        result.view = event.view;
        if (visit.current === result || !visit.entries.includes(result)) show(result); // unless another result is shown
        return;
      case "error":
      case "expired":
        done += event.methods?.length ?? 1;
        result.trouble(event.message, event.methods);
        return complain(result.troubles);
      case "done": return say(result.explanations.length ? `Done in ${event.elapsed_seconds.toFixed(1)} s.` : "");
    }
  };
};

const during = async (work) => {
  const stop = new AbortController();
  running?.abort();
  running = stop;
  id("running").hidden = false;
  id("cancel").hidden = false;
  id("results").setAttribute("aria-busy", "true");
  progress(null);
  try {
    await work(stop.signal);
  } catch (problem) {
    if (problem.name === "AbortError" && running === stop) say("Cancelled.");
    throw problem;
  } finally {
    if (running === stop) {
      running = null;
      id("running").hidden = true;
      id("cancel").hidden = true;
      id("results").removeAttribute("aria-busy");
    }
  }
};

const settled = async () => {
  await started;
  if (!form) throw new Error(NOT_READY);
  await form.settled(); // the description of a model chosen just now may still be loading
};

const titleOf = (ask) => ask.text?.trim() || (ask.example === undefined ? "an image" : `example ${ask.example}`);
const labelOf = ({ target, against }) => {
  const said = (one) => form.about.labels?.[one] ?? one ?? "the prediction";
  return (target ?? against ?? null) === null ? "" : ` → ${said(target)}${(against ?? null) === null ? "" : `, not ${said(against)}`}`;
};

const explain = guarded(async () => {
  await settled();
  const ask = form.ask();
  if (!ask.methods.length) throw new Error("Tick at least one method.");
  const result = new Result(titleOf(ask), `${ask.model.replace("zoo:", "")}${labelOf(ask)} · ${ask.methods.join(", ")}`, ask);
  let listed = false;
  const listen = listener(result, ask.methods.length);
  say("Starting …"); // at once, to replace the status of the previous result
  await during((signal) => stream(ask, (event) => {
    listen(event);
    if (event.event === "view" && !listed) {
      listed = true;
      visit.add(result);
    }
  }, signal));
});

const lookAtHeads = guarded(async () => {
  await settled();
  const given = form.input();
  say("Computing attention …");
  await during(async (signal) => {
    const { view, maps_key: mapsKey } = await post("api/attention", given, signal);
    let result = visit.current;
    if (!result?.ask || JSON.stringify(given) !== JSON.stringify(inputOf(result.ask))) {
      result = new Result(titleOf(given), `${given.model.replace("zoo:", "")} · attention`);
      visit.add(result);
    }
    result.heads = view;
    result.tile = mapsKey && ((layer, head, name = "") => bytes(`api/heads/${mapsKey}?${new URLSearchParams({ layer, head, name })}`));
    show(result);
    say("All heads of all layers are shown below.");
    id("head-view").scrollIntoView({ block: "start" });
  });
});
const inputOf = ({ model, text, text_pair, image, example }) => JSON.parse(JSON.stringify(example === undefined ? { model, text, text_pair, image } : { model, example }));

const reopen = guarded(async (blob) => {
  if (!blob) return;
  const result = new Result(blob.name, "opened from a file");
  if (/\.html?$/i.test(blob.name)) {
    result.view = documentIn(await blob.text());
    if (!result.view) throw new Error(`${blob.name} is not a page saved by clearhead, or it is damaged.`);
  } else {
    const found = await opened(blob);
    found.explanations.forEach((one, place) => result.take(one, found.images[place]));
    result.view = found.view;
  }
  visit.add(result);
  say(`Opened ${blob.name}.`);
  show(result);
});

const beside = guarded(async () => {
  const chosen = visit.together;
  const result = new Result(chosen.map(({ title }) => title).join(" | "), "side by side");
  for (const one of chosen) one.explanations.forEach((explanation, place) => result.take(explanation, one.images[place]));
  result.view = (await post("api/view", result.shown)).view;
  visit.ticked.clear();
  visit.add(result);
  show(result);
});

const start = guarded(async () => {
  const [{ limits, version }, { models }] = await Promise.all([get("api/about"), get("api/models")]);
  id("limits").textContent = `clearhead ${version}. Texts up to ${limits.max_text_characters.toLocaleString("en")} characters, images up to ${Math.round(limits.max_image_bytes / 2 ** 20)} MiB; a request takes at most ${limits.timeout_seconds} s.`;
  form = new Form(limits, complain);
  form.onSaved = reopen;
  form.list(models);
  form.choose(models[0].name);
});

id("ask").addEventListener("submit", (event) => { event.preventDefault(); explain(); });
id("cancel").addEventListener("click", () => running?.abort());
id("heads").addEventListener("click", lookAtHeads);
id("saved").addEventListener("change", async () => { await reopen(id("saved").files[0]); id("saved").value = ""; });
id("beside").addEventListener("click", beside);
id("save-page").addEventListener("click", guarded(() => visit.current.savePage()));
id("save-data").addEventListener("click", guarded(() => visit.current.saveData()));
addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); explain(); }
});
const started = start();
