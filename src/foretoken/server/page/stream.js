// The server's answers: JSON, and server-sent events over fetch, since EventSource cannot POST.
// Knows no page. Addresses are relative, so that the page also works below a proxy's prefix.

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
  const headers = { "content-type": "application/json" };
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
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
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
