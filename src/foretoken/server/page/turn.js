// A prompt and what came of it: the text, what it cost, the timeline, and plain decoding beside it.

import { el, paced } from "./dom.js";
import { markdown } from "./markdown.js";
import { view } from "./media.js";
import { Calls, Reasoning } from "./reply.js";
import { count, duration, measures, rate, shown } from "./run.js";
import { Timeline } from "./timeline.js";
import { TokenText } from "./tokens.js";

const FINISHES = {
  stop: "ended by itself",
  length: "ended by the limit",
  tool_calls: "ended with a call",
};

class Answer {
  #tokens;

  constructor(run, name, before, retry) {
    this.run = run;
    this.retry = retry;
    this.inline = before !== null;
    this.body = el("span", { class: "made" });
    this.prose = el("div", { class: "prose" }); // an answer as it is meant to be read
    this.#tokens = new TokenText(this.body);
    this.reasoning = new Reasoning();
    this.calls = new Calls();
    this.wait = el("p", { class: "wait" }, "Waiting for the first token");
    this.facts = el("p", { class: "facts" });
    this.error = el("div", { class: "error", role: "alert" });
    const text = el(
      "div",
      { class: "text" },
      ...(before ? [el("span", { class: "before" }, before)] : []),
      this.body,
      ...(this.inline ? [] : [this.prose]),
    );
    this.element = el(
      "section",
      { class: run.plain ? "answer plain" : "answer", "aria-label": name },
      el("h2", {}, name),
      this.reasoning.element,
      text,
      this.calls.element,
      this.wait,
      this.facts,
      this.error,
    );
  }

  update() {
    const { run } = this;
    this.#tokens.update(run);
    if (!this.inline && document.body.dataset.view === "text") this.#write(run.text);
    this.reasoning.update(run);
    this.calls.update(run);
    this.element.dataset.state = run.state;
    this.wait.hidden = run.state !== "waiting";
    this.facts.textContent = run.steps.length ? facts(run) : "";
    if (run.state === "done" && !run.said && !run.thoughts) this.facts.textContent = "The text ended at once.";
    if (run.state === "stopped") this.facts.prepend("Stopped. ");
    if (run.error && !this.error.hasChildNodes()) {
      const again = el("button", { type: "button", onclick: this.retry }, "Try again");
      this.error.append(el("p", {}, run.error.message), again);
    }
  }

  #write(text) {
    if (text === this.written) return; // replaced elements would lose what is selected in them
    this.written = text;
    this.prose.replaceChildren(...markdown(text));
  }
}

/** What a text cost, in a line. */
function facts(run) {
  const m = measures(run);
  const parts = [
    count(m.tokens, "token"),
    `${count(m.calls, "run")} of the target`,
    duration(m.seconds),
    rate(m.perSecond),
  ];
  if (FINISHES[run.finish]) parts.push(FINISHES[run.finish]);
  return parts.join(" · ");
}

export class TurnView {
  #marked = null;
  plain = null;

  /** asked: the prompt; media: what goes along; shown: what of the prompt is shown; inline: whether
   * the text continues it; act: what the buttons do. */
  constructor({ asked, media, shown, run, inline, seed }, act) {
    Object.assign(this, { asked, media, shown, run, inline, seed, act });
    this.answer = new Answer(
      run,
      run.plain ? "Plain decoding" : "With a draft",
      inline ? shown : null,
      act.retry,
    );
    this.columns = el("div", { class: "columns" }, this.answer.element);
    this.timeline = new Timeline((number) => this.mark(number));
    this.verdict = el("p", { class: "verdict", role: "status" });
    this.buttons = el("div", { class: "actions" });
    const prompt = []; // none where the text goes on, or has only what calls gave to go by
    if (media.length) prompt.push(el("div", { class: "media" }, ...media.map(view)));
    if (asked && !inline) prompt.push(el("p", { class: "asked" }, asked));
    if (prompt.length) prompt.unshift(el("h2", { class: "hidden" }, "You"));
    const parts = [...prompt, this.columns, this.verdict, this.timeline.element, this.buttons];
    this.element = el("article", { class: "turn" }, ...parts);
    this.answer.element.addEventListener("pointerover", (event) => {
      const step = event.target.closest(".step");
      this.mark(step ? Number(step.dataset.step) : null);
    });
    this.answer.element.addEventListener("pointerleave", () => this.mark(null));
    this.draw = paced(() => this.update(), 0.1); // drawing slows an engine on the same machine
    this.draw();
  }

  /** Plain decoding of the same request beside it. */
  compare(plain) {
    this.plain = new Answer(
      plain,
      "Plain decoding",
      this.inline ? this.shown : null,
      this.act.compare,
    );
    this.columns.querySelector(".plain")?.remove();
    this.columns.append(this.plain.element);
    this.draw();
  }

  /** Shows a step in the text and in the timeline at once. */
  mark(number) {
    if (number === this.#marked) return;
    this.#marked = number;
    this.answer.body.querySelector(".step.on")?.classList.remove("on");
    if (number !== null) this.answer.body.children[number]?.classList.add("on");
    this.timeline.mark(number);
  }

  update() {
    this.answer.update();
    this.plain?.update();
    this.timeline.update(this.run, this.plain?.run);
    this.columns.dataset.answers = this.plain ? 2 : 1;
    this.verdict.textContent = this.plain ? verdict(this.run, this.plain.run) : "";
    this.#offer();
  }

  #offer() {
    const open = this.run.open || this.plain?.run.open;
    const offers = [];
    const offer = (name, act) => offers.push(el("button", { type: "button", onclick: act }, name));
    if (!this.run.open && this.run.said) {
      const { speculation } = this.run.body;
      const lacksPlain = speculation && !this.run.plain && this.plain?.run.state !== "done";
      if (!open && lacksPlain) offer("Decode plainly", this.act.compare);
      if (!open && this.inline && this.run.finish === "length") offer("Go on", this.act.goOn);
      // Browsers have no clipboard for pages that come over plain HTTP from elsewhere
      if (navigator.clipboard) offer("Copy", (event) => this.#copy(event.target));
    }
    const names = offers.map((button) => button.textContent).join();
    if (names === this.offered) return; // replacing a button would take the focus from it
    this.offered = names;
    const seed = el("span", { class: "seed" }, `seed ${this.seed}`);
    const seeded = offers.length && this.seed !== undefined;
    this.buttons.replaceChildren(...offers, ...(seeded ? [seed] : []));
  }

  async #copy(button) {
    await navigator.clipboard.writeText((this.inline ? this.asked : "") + this.run.said);
    button.textContent = "Copied";
  }
}

/** What the comparison of the two shows, once both are there. */
function verdict(run, plain) {
  if (run.state !== "done" || plain.state !== "done") return "";
  const [guessed, alone] = [measures(run), measures(plain)];
  const factor = alone.seconds / alone.tokens / (guessed.seconds / guessed.tokens);
  const speed = `With the draft ${shown(factor, 2, "×")} the speed of plain decoding.`;
  return `${speed} ${likeness(run, plain)}`;
}

function likeness(run, plain) {
  const [text, other] = [run, plain].map(({ thoughts, said }) => thoughts + said);
  if (text === other) return "The texts are identical.";
  if (run.body.temperature !== 0) return "The texts are two draws from one distribution.";
  let same = 0;
  while (text[same] === other[same]) same++;
  const where = `The texts part after ${count(same, "character")}`;
  return `${where}, as rounding can make them where two tokens are nearly tied.`;
}
