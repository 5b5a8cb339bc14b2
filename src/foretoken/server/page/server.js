// What the server says of itself, asked every few seconds: what is active, or why it is not ready.

import { ServerError, get } from "./stream.js";

const EVERY = 5; // seconds between two questions while all is well
const AGAIN = 2; // and while it is not, unless the server says when

export class Server {
  info = null; // /v1/speculation
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
      this.model ??= (await get("v1/models")).data[0]?.id;
      this.info = await get("v1/speculation");
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

  /** A row of names and values for a description list; what is not known yet stays null. */
  facts() {
    const { info } = this;
    const place = (runtime) => [runtime, info.dtype].filter(Boolean).join(", ");
    return [
      ["Model", this.model],
      ["Target", named(info.target)],
      ["Draft", info.draft ? named(info.draft) : "none: nothing is guessed"],
      ["Guessing", info.active ? "yes" : "no"],
      ["Runs on", place(info.runtime)],
      ["Guesses a run, γ", info.gamma],
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
