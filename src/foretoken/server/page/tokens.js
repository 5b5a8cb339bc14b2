// An output as its steps (figure 1 of the paper): a span for each step, with one for each token. The
// style sheet defines how tokens look.

import { el } from "./dom.js";
import { duration } from "./run.js";

const NEAR = 8; // characters: the same spelling further on belongs to another token

export class TokenText {
  #steps = 0;

  constructor(element) {
    this.element = element;
  }

  /** Append new steps; when the run is done, show exactly the server's text. */
  update(run) {
    const fresh = run.steps.slice(this.#steps);
    this.element.append(...fresh.map((step, i) => stepSpan(step, this.#steps + i)));
    this.#steps = run.steps.length;
    run.steps.forEach(({ kind }, i) => {
      const { dataset } = this.element.children[i];
      if (dataset.kind !== kind) dataset.kind = kind;
    });
    if (!this.#steps) this.element.textContent = run.text;
    else if (run.state === "done") this.#settle(run);
  }

  /** Tokens may contain more than the text: parts of a character, or text after a stop string. */
  #settle(run) {
    const spans = [...this.element.querySelectorAll("[data-kind=text] [data-source]")];
    const spellings = spans.map((span) => span.textContent);
    if (spellings.join("") === run.text) return;
    const parts = cut(run.text, spellings);
    spans.forEach((span, i) => span.replaceChildren(...spelled(parts[i], span.dataset.source)));
  }
}

/** Split `text` into one part per spelling: the spelling itself if it is found. Text between goes to
 * the token before, as a character's last token completes it. */
export function cut(text, spellings) {
  const parts = [];
  let at = 0;
  for (const spelling of spellings) {
    const whole = spelling && !spelling.includes("\uFFFD");
    const own = whole ? text.indexOf(spelling, at) : -1;
    if (own < 0 || own > at + NEAR) {
      parts.push("");
      continue;
    }
    if (own > at && parts.length) parts[parts.length - 1] += text.slice(at, own);
    parts.push((parts.length ? "" : text.slice(at, own)) + spelling);
    at = own + spelling.length;
  }
  if (parts.length) parts[parts.length - 1] += text.slice(at);
  return parts;
}

function stepSpan(step, number) {
  const kept = step.tokens.filter((token) => token.source === "accepted");
  const own = step.tokens.filter((token) => token.source !== "accepted");
  const refused = step.rejected.map(({ text }, i) =>
    el(
      "span",
      { class: i ? "guess unjudged" : "guess", "aria-hidden": "true" },
      ...spelled(text.replaceAll("\n", "↵"), "rejected"),
    ),
  );
  const span = el("span", { class: "step", "data-step": number });
  span.append(...kept.map(tokenSpan), ...refused, ...own.map(tokenSpan));
  return span;
}

function tokenSpan({ text, source }) {
  const breaks = text.includes("\n") ? "breaks" : null;
  return el("span", { class: breaks, "data-source": source }, ...spelled(text, source));
}

/** A token's leading space is outside the coloured word, so that it is not struck through. */
function spelled(text, fate) {
  const word = text.trimStart();
  const space = text.slice(0, text.length - word.length);
  return word ? [space, el(fate === "rejected" ? "s" : "span", { class: fate }, word)] : [space];
}

/** Describe a step in a sentence. */
export function told(step, number) {
  const kept = step.tokens.filter((token) => token.source === "accepted").length;
  const drafted = kept + step.rejected.length;
  const fate = drafted ? `${kept} of ${drafted} draft tokens accepted` : "no draft tokens";
  const overlaps = (step.overlaps ?? []).map((x) => x.toFixed(2)).join(", ");
  const times = [
    `target ${duration(step.target_seconds)}`,
    `verifying ${duration(step.verify_seconds)}`,
  ];
  if (drafted) times.unshift(`draft ${duration(step.draft_seconds)}`);
  if (overlaps) times.push(`overlap ${overlaps}`);
  if (step.rows > 1) times.push(`batch of ${step.rows} sequences`);
  return `Step ${number + 1}: ${fate}. ${times.join(", ")}`;
}
