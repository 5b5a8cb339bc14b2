// A run: one request, its output so far, the steps and their sums. A conversation's turn has one,
// and a second one without draft tokens if they are compared. Does not depend on the page.

import { chunks } from "./server.js";

export class Run {
  text = "";
  thoughts = "";
  calls = []; // tool calls: id, name, arguments, and the result that the user enters
  steps = []; // each with the kind of its output: "text", "thought" or "call"
  totals = null; // the server's sums, from the last chunk
  finish = null; // finish_reason: "stop", "length" or "tool_calls"
  error = null;
  state = "waiting"; // then "writing", then "done", "stopped" or "failed"
  #abort = new AbortController();
  #kind = "text";
  #told = 0; // number of steps whose kind is known

  /** path, body: the request, an object or a form; plain: whether it uses no draft tokens. */
  constructor(path, body, plain) {
    Object.assign(this, { path, body, plain });
  }

  get open() {
    return this.state === "waiting" || this.state === "writing";
  }

  /** The text, and a line for each call, without the reasoning. */
  get said() {
    const calls = this.calls.map((call) => `Call to ${call.name}: ${call.arguments}`);
    return [this.text, ...calls].filter(Boolean).join("\n");
  }

  /** The run's messages for a conversation: the assistant's, and the results of its calls. */
  get messages() {
    if (!this.calls.length) return [{ role: "assistant", content: this.text }];
    const tool_calls = this.calls.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
    const results = this.calls.map(({ id, result }) => ({
      role: "tool",
      tool_call_id: id,
      content: result,
    }));
    return [{ role: "assistant", content: this.text || null, tool_calls }, ...results];
  }

  /** Read the stream to its end; `changed` is called on every chunk and at the end. */
  async read(changed) {
    try {
      for await (const chunk of chunks(this.path, this.body, this.#abort.signal)) {
        this.#take(chunk);
        changed();
      }
      this.state = "done";
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      if (this.state === "failed") this.error = error;
    }
    changed();
  }

  stop() {
    this.#abort.abort();
  }

  #take({ choices, speculation, delta }) {
    const choice = choices?.[0] ?? { delta: { content: delta } }; // of a transcription
    const kind = choice ? this.#write(choice.delta ?? { content: choice.text }) : null;
    this.finish = choice?.finish_reason ?? this.finish;
    this.#sort(speculation?.steps ?? [], kind);
    if (speculation?.target_calls !== undefined) this.totals = speculation;
    if (kind || this.steps.length) this.state = "writing";
  }

  /** Append the new output; return its kind, or null if there is none. */
  #write({ content, reasoning_content: thought, tool_calls: calls = [] }) {
    this.text += content ?? "";
    this.thoughts += thought ?? "";
    for (const { index, id, function: { name, arguments: more = "" } } of calls) {
      this.calls[index] ??= { id, name, arguments: "", result: "" };
      this.calls[index].arguments += more;
    }
    if (content) return "text";
    if (calls.length) return "call";
    return thought ? "thought" : null;
  }

  /** Append steps. Steps whose text the server holds back get their kind with the next output.
   * Marks have the kind of the reasoning or calls next to them. */
  #sort(steps, kind) {
    this.#kind = kind ?? this.#kind;
    this.steps.push(...steps.map((step) => ({ ...step, kind: this.#kind })));
    if (!kind) return;
    for (const step of this.steps.slice(this.#told)) if (step.kind === "text") step.kind = kind;
    this.#told = this.steps.length;
  }
}

/** Return a run's tokens, target calls and seconds so far, and accepted draft tokens by position. */
export function measures(run) {
  const { steps, totals } = run;
  const tokens = sum(steps, (step) => step.tokens.length);
  const made = [];
  const kept = [];
  for (const step of steps) {
    const accepted = step.tokens.filter((token) => token.source === "accepted").length;
    for (let i = 0; i < accepted + step.rejected.length; i++) {
      made[i] = (made[i] ?? 0) + 1;
      kept[i] = (kept[i] ?? 0) + (i < accepted ? 1 : 0);
    }
  }
  const overlaps = steps.flatMap((step) => step.overlaps ?? []);
  const seconds = totals?.seconds ?? sum(steps, took);
  return {
    tokens,
    seconds,
    calls: steps.length,
    perCall: steps.length ? tokens / steps.length : null,
    perSecond: seconds ? tokens / seconds : null,
    drafted: sum(made, (n) => n),
    accepted: sum(kept, (n) => n),
    positions: made.map((n, i) => ({ made: n, kept: kept[i] })),
    alpha: overlaps.length ? sum(overlaps, (x) => x) / overlaps.length : null,
    mates: Math.max(0, ...steps.map((step) => step.rows ?? 1)) - 1,
  };
}

/** Return how much faster outputs were with draft tokens than plainly, and their number. Only
 * requests that were decoded both ways count, as speed depends on the text. */
export function speedup(pairs) {
  const done = pairs.filter((pair) => pair.every(({ state, steps }) => state === "done" && steps.length));
  const all = done.map((pair) => pair.map(measures));
  const plainly = sum(all, ([drafted, plain]) => (drafted.tokens * plain.seconds) / plain.tokens);
  const factor = all.length ? plainly / sum(all, ([drafted]) => drafted.seconds) : null;
  return { factor, texts: all.length };
}

/** Return the seconds of a step. */
export function took(step) {
  return step.draft_seconds + step.target_seconds + step.verify_seconds;
}

export function sum(list, value) {
  return list.reduce((total, item) => total + value(item), 0);
}

export const UNKNOWN = "not measured yet";

/** Return a number with `digits` decimal places and its unit, or UNKNOWN if there is none. */
export function shown(value, digits = 0, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  const number = value.toLocaleString("en", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
  return number + unit;
}

export function rate(perSecond) {
  return shown(perSecond, perSecond < 100 ? 1 : 0, " tokens/s");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.01) return shown(seconds * 1000, 1, " ms");
  if (seconds < 1) return shown(seconds * 1000, 0, " ms");
  return shown(seconds, seconds < 10 ? 2 : 1, " s");
}

export function count(n, noun) {
  return `${shown(n)} ${noun}${n === 1 ? "" : "s"}`;
}
