// One text on its way: a request, the steps that come of it, and what they cost. A conversation's
// turn has one, and a second one without guesses where the two are compared. Knows no page.

import { chunks } from "./stream.js";

export class Run {
  text = "";
  steps = [];
  totals = null; // the server's sums, with the last chunk
  finish = null; // "stop", "length": why the text ended
  error = null;
  state = "waiting"; // then "writing", then "done", "stopped" or "failed"
  #abort = new AbortController();

  /** path, body: the request; plain: whether it makes no guesses. */
  constructor(path, body, plain) {
    Object.assign(this, { path, body, plain });
  }

  get open() {
    return this.state === "waiting" || this.state === "writing";
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

  #take({ choices, speculation }) {
    const choice = choices?.[0];
    if (choice) {
      this.text += choice.delta?.content ?? choice.text ?? "";
      this.finish = choice.finish_reason ?? this.finish;
    }
    this.steps.push(...(speculation?.steps ?? []));
    if (speculation?.target_calls !== undefined) this.totals = speculation;
    if (this.text || this.steps.length) this.state = "writing";
  }
}
