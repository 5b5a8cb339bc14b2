// A text as the steps that made it (figure 1 of the paper): a span for every run of the target, and
// in it one for every token. What a token looks like is the style sheet's.

import { el } from "./dom.js";
import { duration } from "./run.js";

const NEAR = 8; // letters: a token that is spelled alike further on is another one

export class TokenText {
  #steps = 0;

  constructor(element) {
    this.element = element;
  }

  /** Appends what has come since; once the run is over, the text stands as the server gave it. */
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

  /** Tokens may spell what is not in the text: half a character, what lies behind a stop string. */
  #settle(run) {
    const spans = [...this.element.querySelectorAll("[data-kind=text] [data-source]")];
    const spellings = spans.map((span) => span.textContent);
    if (spellings.join("") === run.text) return;
    const parts = cut(run.text, spellings);
    spans.forEach((span, i) => span.replaceChildren(...spelled(parts[i], span.dataset.source)));
  }
}

/** `text` in as many parts as there are spellings, each its token's own where that is found. What
 * lies between goes to the token before: a character's last token completes it. */
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

/** A token's space stands before the word that is coloured, so that no line is drawn through it. */
function spelled(text, fate) {
  const word = text.trimStart();
  const space = text.slice(0, text.length - word.length);
  return word ? [space, el(fate === "rejected" ? "s" : "span", { class: fate }, word)] : [space];
}

/** What a step did, in a sentence. */
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
  if (step.rows > 1) times.push(`shared by ${step.rows} texts`);
  return `Run ${number + 1}: ${fate}. ${times.join(", ")}`;
}
