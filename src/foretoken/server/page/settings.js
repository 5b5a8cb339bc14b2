// The controls below the prompt, as fields of a request. The server validates the values; its error
// is shown.

import { el } from "./dom.js";
import { count } from "./run.js";

const MOST = 16; // largest gamma to choose
const OPEN = "foretoken-settings";
const SEEDS = 2 ** 31;
const ANSWER_TOKENS = 1024; // default limit of an answer, as on the command line

export class Settings {
  constructor(details) {
    this.details = details;
    this.inputs = Object.fromEntries(
      [...details.querySelectorAll("[name]")].map((input) => [input.name, input]),
    );
    const names = [
      ["automatic", ""],
      ["0, plain decoding", 0],
    ];
    for (let n = 1; n <= MOST; n++) names.push([`${n}`, n]);
    this.inputs.gamma.append(...names.map(([name, value]) => el("option", { value }, name)));
    for (const event of ["input", "toggle"])
      details.addEventListener(event, () => this.#summarize());
    details.open = localStorage.getItem(OPEN) !== null; // as the user left it
    details.addEventListener("toggle", () =>
      details.open ? localStorage.setItem(OPEN, "open") : localStorage.removeItem(OPEN),
    );
    this.#summarize();
  }

  /** Show the controls for the model's task, with the temperature of its generation config. Without
   * one, chats are greedy, as on the command line; their tokens are limited. */
  follow({ transcribes, chat, temperature, context }) {
    this.makes = transcribes ? "speech" : chat ? "chat" : "text";
    for (const label of this.details.querySelectorAll("[data-for]")) {
      label.hidden = !label.matches(`[data-for~=${this.makes}]`);
    }
    if (!this.followed) {
      this.inputs.temperature.value = temperature ?? (chat ? 0 : 1);
      const most = Math.floor((context ?? Infinity) / 2); // leaves room for the prompt
      if (chat) this.inputs.max_tokens.value = Math.min(ANSWER_TOKENS, most);
    }
    this.followed = true;
    this.#summarize();
  }

  /** Offer models by name if there are several; chosen(name) is called on a change. */
  offer(models, chosen) {
    const { model } = this.inputs;
    if (model.options.length) return;
    model.append(...models.map((name) => el("option", { value: name }, name)));
    model.closest("label").hidden = models.length < 2;
    model.addEventListener("change", () => chosen(model.value));
  }

  get compare() {
    return this.inputs.compare.checked;
  }

  get system() {
    return this.inputs.system.value.trim();
  }

  /** Language of the speech; empty: detected. */
  get language() {
    return this.inputs.language.value.trim();
  }

  /** Return whether the values form a request; focus the field that is invalid. */
  valid() {
    if (this.#tools()) return true;
    this.details.open = true;
    this.inputs.tools.focus();
    return false;
  }

  /** Return the tools for a chat model; null, with a message, if they are not a list. */
  #tools() {
    if (this.makes !== "chat") return [];
    const { tools } = this.inputs;
    let list = null;
    let problem = "Tools must be a list in JSON: [{…}, {…}].";
    try {
      list = JSON.parse(tools.value.trim() || "[]");
    } catch (error) {
      problem = `${problem} ${error.message}`;
    }
    const good = Array.isArray(list);
    this.details.querySelector("#tools-problem").textContent = good ? "" : problem;
    tools.setAttribute("aria-invalid", !good);
    return good ? list : null;
  }

  /** Return the fields of a request. The seed is always set, for reproducible outputs. */

  fields() {
    const fields = { seed: Math.floor(Math.random() * SEEDS) };
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (this.inputs[name].value !== "") fields[name] = Number(this.inputs[name].value);
    }
    const { value } = this.inputs.gamma;
    fields.speculation = { gamma: value === "" ? null : Number(value), steps: true };
    const tools = this.#tools();
    if (tools.length) Object.assign(fields, { tools, tool_choice: this.inputs.tool_choice.value });
    return fields;
  }

  #summarize() {
    const { temperature, top_p, max_tokens, seed, gamma } = this.inputs;
    const tools = this.#tools();
    const spoken = [`language ${this.language || "detected"}`];
    const written = [
      `temperature ${temperature.value || "the model's"}`,
      top_p.value && top_p.value !== "1" ? `top-p ${top_p.value}` : "",
      max_tokens.value ? `at most ${max_tokens.value} tokens` : "",
      seed.value ? `seed ${seed.value}` : "",
      `γ ${gamma.selectedOptions[0].textContent}`,
      tools?.length ? count(tools.length, "tool") : "",
    ];
    const parts = this.makes === "speech" ? spoken : written;
    const summary = this.details.open ? "Settings" : parts.filter(Boolean).join(" · ");
    this.details.querySelector("#summary").textContent = summary;
  }
}
