// The server's answers: JSON, and server-sent events over fetch, since EventSource cannot POST; and
// what it says of itself, asked every few seconds: what is active, or why it is not ready. Addresses
// are relative, so that the page also works below a proxy's prefix.

const KEY = "foretoken-key";

export class ServerError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status; // 0: no answer, or one that broke off
    this.retryAfter = retryAfter; // seconds
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

async function request(path, options) {
  // A form names its type itself
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

/** The chunks of a stream, up to [DONE]. Throws what the server refuses, before or within it. */
export async function* chunks(path, body, signal) {
  const sent = body instanceof FormData ? body : JSON.stringify(body);
  const response = await request(path, { method: "POST", body: sent, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, response.status);
    yield chunk;
  }
  throw new ServerError("The stream broke off before its end.");
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
    throw new ServerError("The connection was lost before the text was finished.");
  } finally {
    reader.cancel().catch(() => {}); // a reader that leaves early frees its row at the server
  }
}

const EVERY = 5; // seconds between two questions while all is well
const AGAIN = 2; // and while it is not, unless the server says when

export class Server {
  info = null; // /v1/speculation, of the chosen model
  models = []; // names, that of the base first
  model = null; // the name that requests give
  #timer = null;

  /** told(problem): called after every answer; problem is null, or a ServerError. */
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
    // An answer with the wrong key stays wrong, and a hidden page shows nothing.
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

  /** A row of names and values for a description list; what is not known yet stays null. */
  facts() {
    const { info } = this;
    const place = (runtime) => [runtime, info.dtype].filter(Boolean).join(", ");
    return [
      ["Model", this.model],
      ["Target", named(info.target)],
      ["Draft", info.draft ? named(info.draft) : "none: no draft tokens"],
      ["Drafting", info.active ? "yes" : "no"],
      ["Runs on", place(info.runtime)],
      ["Draft tokens a forward, γ", info.gamma],
      ["Overlap of draft and target, α", info.alpha?.toFixed(2)],
      ["Time of a draft run in target runs, c", info.c?.toFixed(3)],
      ["Time to score n tokens, v(n)", info.v && costs(info.v)],
      ["Tokens per run of the target", info.tokens_per_call?.toFixed(2)],
      ["Texts now", `${info.running} running, ${info.waiting} waiting`],
      ["Context", info.context && `${info.context.toLocaleString("en")} tokens`],
    ];
  }
}

/** A model's name, or the last of a folder's. */
export function named(model) {
  return model.startsWith("/") ? model.split("/").findLast(Boolean) : model;
}

/** v at one token, at the most that was measured, and at one place between. */
function costs(v) {
  const some = [...new Set([v[0], v[Math.floor(v.length / 2)], v.at(-1)])];
  return some.map(([n, cost]) => `v(${n}) = ${cost.toFixed(2)}`).join(", ");
}
