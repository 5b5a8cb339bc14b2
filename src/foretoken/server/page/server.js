// Requests to the server: JSON, and server-sent events over fetch, since EventSource cannot POST;
// and its state, polled every few seconds: its models, or why it is not ready. URLs are relative, so
// that the page also works below a proxy's prefix.

const KEY = "foretoken-key";

export class ServerError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status; // 0: no answer, or an incomplete one
    this.retryAfter = retryAfter; // seconds
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

async function request(path, options) {
  // The browser sets a form's content type
  const headers = options.body instanceof FormData ? {} : { "content-type": "application/json" };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message || `The server answered ${response.status}.`;
  return new ServerError(
    message,
    response.status,
    Number(response.headers.get("retry-after")) || null,
  );
}

export async function get(path) {
  return (await request(path, {})).json();
}

/** Yield the chunks of a stream, up to [DONE]. Throws the server's error, before or within it. */
export async function* chunks(path, body, signal) {
  const sent = body instanceof FormData ? body : JSON.stringify(body);
  const response = await request(path, { method: "POST", body: sent, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, response.status);
    yield chunk;
  }
  throw new ServerError("The stream ended before the output was complete.");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (unread + value).split(/\r?\n\r?\n/);
      unread = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost before the output was complete.");
  } finally {
    reader.cancel().catch(() => {}); // so that the server aborts an unfinished request
  }
}

const EVERY = 5; // seconds between two polls
const AGAIN = 2; // seconds after an error, unless the server sends Retry-After

export class Server {
  info = null; // /v1/speculation, of the chosen model
  models = []; // names, the base model first
  model = null; // the model of requests
  #timer = null;

  /** told(problem): called after every poll; problem is null, or a ServerError. */
  constructor(told) {
    this.told = told;
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  }

  async ask() {
    clearTimeout(this.#timer);
    let problem = null;
    try {
      if (!this.models.length) this.models = (await get("v1/models")).data.map(({ id }) => id);
      this.model ??= this.models[0];
      this.info = await get(`v1/speculation?model=${encodeURIComponent(this.model)}`);
    } catch (error) {
      problem = error instanceof ServerError ? error : new ServerError(error.message);
    }
    const wait = problem ? Math.min(problem.retryAfter ?? AGAIN, 10) : EVERY;
    // A wrong key stays wrong, and a hidden page needs no update.
    if (problem?.status !== 401 && !document.hidden) {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.ask(), wait * 1000);
    }
    this.told(problem);
  }

  choose(model) {
    this.model = model;
    this.ask();
  }

  /** Return [name, value] pairs for a description list; unknown values are null. */
  facts() {
    const { info } = this;
    const place = (runtime) => [runtime, info.dtype].filter(Boolean).join(", ");
    return [
      ["Model", this.model],
      ["Target", named(info.target)],
      ["Draft", info.draft ? named(info.draft) : "none: no draft tokens"],
      ["Drafting", info.active ? "yes" : "no"],
      ["Backend", place(info.runtime)],
      ["Draft tokens per target call, γ", info.gamma],
      ["Overlap of draft and target, α", info.alpha?.toFixed(2)],
      ["Forward pass of the drafter / of the target, c", info.c?.toFixed(3)],
      ["Target call over n tokens / over 1, v(n)", info.v && costs(info.v)],
      ["Tokens per target call", info.tokens_per_call?.toFixed(2)],
      ["Sequences", `${info.running} running, ${info.waiting} waiting`],
      ["Context", info.context && `${info.context.toLocaleString("en")} tokens`],
    ];
  }
}

/** Return a model's name, or the last part of a path. */
export function named(model) {
  return model.startsWith("/") ? model.split("/").findLast(Boolean) : model;
}

/** Format v at one token, at the largest measured number, and at one between. */
function costs(v) {
  const some = [...new Set([v[0], v[Math.floor(v.length / 2)], v.at(-1)])];
  return some.map(([n, cost]) => `v(${n}) = ${cost.toFixed(2)}`).join(", ");
}
