// The controls below the prompt, read into the fields of a request. What they may be is the
// server's to say: its answer is shown.

import { el } from "./dom.js";
import { count } from "./run.js";

const MOST = 16; // draft tokens to choose from
const OPEN = "foretoken-settings";
const SEEDS = 2 ** 31;
const ANSWER_TOKENS = 1024; // of an answer at most, as on the command line

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
    details.open = localStorage.getItem(OPEN) !== null; // closed, unless left open the last time
    details.addEventListener("toggle", () =>
      details.open ? localStorage.setItem(OPEN, "open") : localStorage.removeItem(OPEN),
    );
    this.#summarize();
  }

  /** Follows what the model makes, and the sampling that its generation config asks for: an answer
   * is greedy where that asks for nothing, as on the command line, and has a limit. */
  follow({ transcribes, chat, temperature, context }) {
    this.makes = transcribes ? "speech" : chat ? "chat" : "text";
    for (const label of this.details.querySelectorAll("[data-for]")) {
      label.hidden = !label.matches(`[data-for~=${this.makes}]`);
    }
    if (!this.followed) {
      this.inputs.temperature.value = temperature ?? (chat ? 0 : 1);
      const most = Math.floor((context ?? Infinity) / 2); // which leaves room for the prompt
      if (chat) this.inputs.max_tokens.value = Math.min(ANSWER_TOKENS, most);
    }
    this.followed = true;
    this.#summarize();
  }

  /** Offers models by name, where there are several; chosen(name) is called with another. */
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

  /** A sound's; empty: as the model hears it. */
  get language() {
    return this.inputs.language.value.trim();
  }

  /** Whether a request can be made of it all; goes to the field of which none can. */
  valid() {
    if (this.#tools()) return true;
    this.details.open = true;
    this.inputs.tools.focus();
    return false;
  }

  /** The tools that are offered to a chat model; null for what is no list, which is said. */
  #tools() {
    if (this.makes !== "chat") return [];
    const { tools } = this.inputs;
    let list = null;
    let problem = "Tools are a list in JSON: [{…}, {…}].";
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

  /** The fields of a request. The seed is always given, so that the text can be made again. */
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
    const spoken = [`language ${this.language || "as heard"}`];
    const written = [
      `temperature ${temperature.value || "the model's"}`,
      top_p.value && top_p.value !== "1" ? `top-p ${top_p.value}` : "",
      max_tokens.value ? `${max_tokens.value} tokens at most` : "",
      seed.value ? `seed ${seed.value}` : "",
      `γ ${gamma.selectedOptions[0].textContent}`,
      tools?.length ? count(tools.length, "tool") : "",
    ];
    const parts = this.makes === "speech" ? spoken : written;
    const summary = this.details.open ? "Settings" : parts.filter(Boolean).join(" · ");
    this.details.querySelector("#summary").textContent = summary;
  }
}
