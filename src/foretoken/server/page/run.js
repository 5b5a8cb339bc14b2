// One text on its way: a request, the steps that come of it, and what they add up to and cost.
// A conversation's turn has one, and a second one without a draft where the two are compared. Knows
// no page.

import { chunks } from "./server.js";

export class Run {
  text = "";
  thoughts = "";
  calls = []; // of tools: id, name and arguments, and the result that a reader types
  steps = []; // each with the kind of what it wrote: "text", "thought" or "call"
  totals = null; // the server's sums, with the last chunk
  finish = null; // "stop", "length", "tool_calls": why the text ended
  error = null;
  state = "waiting"; // then "writing", then "done", "stopped" or "failed"
  #abort = new AbortController();
  #kind = "text";
  #told = 0; // steps of which it is known what they wrote

  /** path, body: the request, an object or a form; plain: whether it makes no draft tokens. */
  constructor(path, body, plain) {
    Object.assign(this, { path, body, plain });
  }

  get open() {
    return this.state === "waiting" || this.state === "writing";
  }

  /** All that is meant for others: the text, and a line for each call. */
  get said() {
    const calls = this.calls.map((call) => `Call of ${call.name}: ${call.arguments}`);
    return [this.text, ...calls].filter(Boolean).join("\n");
  }

  /** The messages of a conversation that came of it: the assistant's, and what its calls gave. */
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

  /** Reads the stream to its end; `changed` is called with every chunk, and at the end. */
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
    const choice = choices?.[0] ?? { delta: { content: delta } }; // of speech that is written down
    const kind = choice ? this.#write(choice.delta ?? { content: choice.text }) : null;
    this.finish = choice?.finish_reason ?? this.finish;
    this.#sort(speculation?.steps ?? [], kind);
    if (speculation?.target_calls !== undefined) this.totals = speculation;
    if (kind || this.steps.length) this.state = "writing";
  }

  /** Takes what is new; returns its kind, if there is anything. */
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

  /** Steps whose text the server holds back are of the kind that it turns out to be. Marks go with
   * the thoughts or calls beside them. */
  #sort(steps, kind) {
    this.#kind = kind ?? this.#kind;
    this.steps.push(...steps.map((step) => ({ ...step, kind: this.#kind })));
    if (!kind) return;
    for (const step of this.steps.slice(this.#told)) if (step.kind === "text") step.kind = kind;
    this.#told = this.steps.length;
  }
}

/** Of a run, so far: tokens, calls, seconds, and how many draft tokens were accepted at each position. */
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

/** How much faster texts were with a draft than the same requests plainly, and how many they are.
 * What was not decoded both ways says nothing: another text may be another kind of text. */
export function speedup(pairs) {
  const done = pairs.filter((pair) => pair.every(({ state, steps }) => state === "done" && steps.length));
  const all = done.map((pair) => pair.map(measures));
  const plainly = sum(all, ([guessed, plain]) => (guessed.tokens * plain.seconds) / plain.tokens);
  const factor = all.length ? plainly / sum(all, ([guessed]) => guessed.seconds) : null;
  return { factor, texts: all.length };
}

/** Seconds of a step. */
export function took(step) {
  return step.draft_seconds + step.target_seconds + step.verify_seconds;
}

export function sum(list, value) {
  return list.reduce((total, item) => total + value(item), 0);
}

export const UNKNOWN = "not measured yet";

/** `digits` behind the point, then the unit; what was not measured says so. */
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
