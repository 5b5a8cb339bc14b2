// A prompt and its output, its measurements and timeline, and plain decoding next to it.

import { el, paced } from "./dom.js";
import { markdown } from "./markdown.js";
import { view } from "./media.js";
import { Calls, Reasoning } from "./reply.js";
import { count, duration, measures, rate, shown } from "./run.js";
import { Timeline } from "./timeline.js";
import { TokenText } from "./tokens.js";

const FINISHES = {
  stop: "ended by the model",
  length: "ended by the token limit",
  tool_calls: "ended with a tool call",
};

class Answer {
  #tokens;

  constructor(run, name, before, retry) {
    this.run = run;
    this.retry = retry;
    this.inline = before !== null;
    this.body = el("span", { class: "made" });
    this.prose = el("div", { class: "prose" }); // the answer as rendered Markdown
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
    if (run.state === "done" && !run.said && !run.thoughts) this.facts.textContent = "The output is empty.";
    if (run.state === "stopped") this.facts.prepend("Stopped. ");
    if (run.error && !this.error.hasChildNodes()) {
      const again = el("button", { type: "button", onclick: this.retry }, "Try again");
      this.error.append(el("p", {}, run.error.message), again);
    }
  }

  #write(text) {
    if (text === this.written) return; // replacing elements would lose the selection
    this.written = text;
    this.prose.replaceChildren(...markdown(text));
  }
}

/** Return an output's measurements in one line. */
function facts(run) {
  const m = measures(run);
  const parts = [
    count(m.tokens, "token"),
    count(m.calls, "target call"),
    duration(m.seconds),
    rate(m.perSecond),
  ];
  if (FINISHES[run.finish]) parts.push(FINISHES[run.finish]);
  return parts.join(" · ");
}

export class TurnView {
  #marked = null;
  plain = null;

  /** asked: the prompt; media: its attachments; shown: the part of the prompt that is shown; inline:
   * whether the output continues the prompt's text; act: functions of the buttons. */
  constructor({ asked, media, shown, run, inline, seed }, act) {
    Object.assign(this, { asked, media, shown, run, inline, seed, act });
    this.answer = new Answer(
      run,
      run.plain ? "Plain decoding" : "Speculative decoding",
      inline ? shown : null,
      act.retry,
    );
    this.columns = el("div", { class: "columns" }, this.answer.element);
    this.timeline = new Timeline((number) => this.mark(number));
    this.verdict = el("p", { class: "verdict", role: "status" });
    this.buttons = el("div", { class: "actions" });
    const prompt = []; // empty if the output continues the prompt, or only call results were sent
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

  /** Show plain decoding of the same request next to it. */
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

  /** Mark a step both in the text and in the timeline. */
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
      if (!open && this.inline && this.run.finish === "length") offer("Continue", this.act.goOn);
      // Browsers give pages over plain HTTP from another host no clipboard
      if (navigator.clipboard) offer("Copy", (event) => this.#copy(event.target));
    }
    const names = offers.map((button) => button.textContent).join();
    if (names === this.offered) return; // replacing a button would lose the focus
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

/** Return the result of the comparison, once both runs are done. */
function verdict(run, plain) {
  if (run.state !== "done" || plain.state !== "done") return "";
  const [drafted, alone] = [measures(run), measures(plain)];
  const factor = alone.seconds / alone.tokens / (drafted.seconds / drafted.tokens);
  const speed = `Speculative decoding: ${shown(factor, 2, "×")} the speed of plain decoding.`;
  return `${speed} ${likeness(run, plain)}`;
}

function likeness(run, plain) {
  const [text, other] = [run, plain].map(({ thoughts, said }) => thoughts + said);
  if (text === other) return "The outputs are identical.";
  if (run.body.temperature !== 0) return "The outputs are two samples from one distribution.";
  let same = 0;
  while (text[same] === other[same]) same++;
  const where = `The outputs differ after ${count(same, "character")}`;
  return `${where}: rounding can decide between two nearly tied tokens.`;

}
