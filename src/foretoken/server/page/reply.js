// Parts of a reply besides its text: the reasoning before it, and the tool calls after it, each
// with a field for its result.

import { el } from "./dom.js";

const DEEPEST = 16; // levels of indentation

export class Reasoning {
  #text = el("p");
  #alone = null;

  constructor() {
    const chevron = el("span", { class: "chevron", "aria-hidden": "true" });
    const summary = el("summary", {}, chevron, "Reasoning");
    this.element = el("details", { class: "reasoning", hidden: true }, summary, this.#text);
  }

  /** Open while there is no text or call yet, then close; after that, leave it to the user. */
  update({ thoughts, text, calls }) {
    this.element.hidden = !thoughts;
    if (this.#text.textContent !== thoughts) this.#text.textContent = thoughts;
    const alone = !text && !calls.length;
    if (alone !== this.#alone) this.element.open = alone;
    this.#alone = alone;
  }
}

export class Calls {
  element = el("div", { class: "calls" });
  #parts = [];

  update({ calls, open }) {
    const fresh = calls.slice(this.#parts.length).map((call) => new CallView(call));
    this.#parts.push(...fresh);
    this.element.append(...fresh.map((part) => part.element));
    for (const part of this.#parts) part.update(open);
  }
}

class CallView {
  #arguments = el("pre", { tabindex: 0 });

  constructor(call) {
    this.call = call;
    const typed = (event) => (call.result = event.target.value);
    const field = el("textarea", { rows: 1, form: "composer", placeholder: "None", oninput: typed });
    this.result = el("label", { hidden: true }, "Result ", field);
    const head = el("h3", {}, "Call to ", el("code", {}, call.name));
    const name = `Call to ${call.name}`;
    this.element = el("section", { class: "call", "aria-label": name }, head, this.#arguments, this.result);
  }

  update(open) {
    const shown = indented(this.call.arguments);
    if (this.#arguments.textContent !== shown) this.#arguments.textContent = shown;
    this.result.hidden = open;
  }
}

/** Return JSON with a line for each member. It is not parsed, so numbers keep their digits and it
 * may be incomplete. */
export function indented(json) {
  let depth = 0;
  const line = (change) => `\n${"  ".repeat(Math.max(0, Math.min((depth += change), DEEPEST)))}`;
  return json.replace(/"(?:[^"\\]|\\[^])*"?|\{\s*\}|\[\s*\]|[[\]{},:]|\s+/g, (part) => {
    if (part[0] === '"') return part;
    const sign = part.replace(/\s+/g, "");
    if (sign === "{" || sign === "[") return sign + line(1);
    if (sign === "}" || sign === "]") return line(-1) + sign;
    if (sign === ",") return sign + line(0);
    return sign === ":" ? ": " : sign;
  });
}
