// Requests to the server. The token, if the server requires one, is the fragment of the URL (after #), which browsers
// do not send.

const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("clearhead-token");
if (token) {
  sessionStorage.setItem("clearhead-token", token);
  if (location.hash) history.replaceState(null, "", location.pathname);
}

export class Refused extends Error {}

const headers = (more) => ({ ...(token ? { authorization: `Bearer ${token}` } : {}), ...more });

const checked = async (answer) => {
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => ({}));
  throw new Refused(said.error ?? `The server answered ${answer.status}.`);
};

const send = async (path, options) => {
  try {
    return await checked(await fetch(path, options));
  } catch (problem) {
    if (problem instanceof TypeError) throw new Refused("The server does not respond. Is clearhead serve still running?");
    throw problem;
  }
};

const posted = (body, more) => ({ method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), ...more });

export const get = async (path) => (await send(path, { headers: headers() })).json();

export const bytes = async (path) => new Uint8Array(await (await send(path, { headers: headers() })).arrayBuffer());

export const post = async (path, body, signal) => (await send(path, posted(body, { signal }))).json();

export const file = async (path, body) => (await send(path, posted(body))).blob();

export const opened = async (blob) =>
  (await send("api/open", { method: "POST", headers: headers({ "content-type": "application/octet-stream" }), body: blob })).json();

// Calls `tell` with each event of a request. If the queue is full, retries after the time in Retry-After.
export const stream = async (ask, tell, signal) => {
  let answer;
  for (;;) {
    answer = await fetch("api/explain", posted(ask, { signal })).catch((problem) => {
      throw problem instanceof TypeError ? new Refused("The server does not respond. Is clearhead serve still running?") : problem;
    });
    if (answer.status !== 429) break;
    const seconds = Number(answer.headers.get("retry-after")) || 1;
    tell({ event: "busy", seconds });
    await new Promise((wake, fail) => {
      const timer = setTimeout(wake, seconds * 1000);
      signal.addEventListener("abort", () => { clearTimeout(timer); fail(signal.reason); }, { once: true });
    });
  }
  await checked(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", last = null;
  const broken = () => new Refused("The connection was interrupted. Is clearhead serve still running?");
  for (;;) {
    const { value, done } = await reader.read().catch((problem) => { throw problem instanceof TypeError ? broken() : problem; });
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      last = event.event;
      tell(event);
    }
  }
  if (!["done", "cancelled", "expired"].includes(last)) throw broken();
};
