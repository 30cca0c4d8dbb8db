// Requests to the server. The token, if the server requires one, is the fragment of the URL (after #), which browsers
// do not send.

const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("clearhead-token");
if (token) {
  sessionStorage.setItem("clearhead-token", token);
  if (location.hash) history.replaceState(null, "", location.pathname);
}

export class RequestError extends Error {}

const makeHeaders = (extraHeaders) => ({ ...(token ? { authorization: `Bearer ${token}` } : {}), ...extraHeaders });

const checkResponse = async (response) => {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new RequestError(body.error ?? `The server returned the HTTP status ${response.status}.`);
};

const sendRequest = async (path, options) => {
  try {
    return await checkResponse(await fetch(path, options));
  } catch (error) {
    if (error instanceof TypeError) throw new RequestError("The server does not respond. Is clearhead serve still running?");
    throw error;
  }
};

const makePostOptions = (body, extraOptions) => ({ method: "POST", headers: makeHeaders({ "content-type": "application/json" }), body: JSON.stringify(body), ...extraOptions });

export const getJson = async (path) => (await sendRequest(path, { headers: makeHeaders() })).json();

export const getBytes = async (path) => new Uint8Array(await (await sendRequest(path, { headers: makeHeaders() })).arrayBuffer());

export const postJson = async (path, body, signal) => (await sendRequest(path, makePostOptions(body, { signal }))).json();

export const postForFile = async (path, body) => (await sendRequest(path, makePostOptions(body))).blob();

export const openSavedFile = async (blob) =>
  (await sendRequest("api/open", { method: "POST", headers: makeHeaders({ "content-type": "application/octet-stream" }), body: blob })).json();

// Calls `onEvent` with each event of a request. If the queue is full, retries after the time in Retry-After.
export const streamExplanations = async (request, onEvent, signal) => {
  let response;
  for (;;) {
    response = await fetch("api/explain", makePostOptions(request, { signal })).catch((error) => {
      throw error instanceof TypeError ? new RequestError("The server does not respond. Is clearhead serve still running?") : error;
    });
    if (response.status !== 429) break;
    const seconds = Number(response.headers.get("retry-after")) || 1;
    onEvent({ event: "busy", seconds });
    await new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, seconds * 1000);
      signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
    });
  }
  await checkResponse(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let remainder = "", lastEvent = null;
  const makeConnectionError = () => new RequestError("The connection was interrupted. Is clearhead serve still running?");
  for (;;) {
    const { value, done } = await reader.read().catch((error) => { throw error instanceof TypeError ? makeConnectionError() : error; });
    if (done) break;
    const lines = (remainder + value).split("\n");
    remainder = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      lastEvent = event.event;
      onEvent(event);
    }
  }
  if (!["done", "cancelled", "expired"].includes(lastEvent)) throw makeConnectionError();
};
