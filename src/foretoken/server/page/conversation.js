// A list of turns, of which the last may be on its way. Conversations know nothing of one another,
// so each streams for itself, shown or not.

import { Run } from "./run.js";
import { TurnView } from "./turn.js";

const TITLE = 48; // letters of the first prompt
const REMEMBERED = 240; // letters of a text that goes on that are shown again

export class Conversation {
  turns = [];
  element = document.createElement("div");

  /** changed: called with every chunk; ended(run): where a text is finished. */
  constructor(changed, ended) {
    Object.assign(this, { changed, ended });
  }

  get title() {
    const first = this.turns[0]?.asked.replace(/\s+/g, " ").trim() ?? "New conversation";
    return first.length > TITLE ? `${first.slice(0, TITLE).trimEnd()}…` : first;
  }

  get last() {
    return this.turns.at(-1);
  }

  get runs() {
    return this.turns.flatMap((turn) => [turn.run, ...(turn.plain ? [turn.plain.run] : [])]);
  }

  /** Texts that were decoded both with guesses and plainly. */
  get pairs() {
    return this.turns.filter((turn) => turn.plain).map(({ run, plain }) => [run, plain.run]);
  }

  get open() {
    return this.runs.some((run) => run.open);
  }

  /** What a chat model is to read: all that was said and answered, then the prompt. */
  messages(system, prompt) {
    const said = this.turns
      .filter((turn) => turn.run.text)
      .flatMap(({ asked, run }) => [
        { role: "user", content: asked },
        { role: "assistant", content: run.text },
      ]);
    const before = system ? [{ role: "system", content: system }] : [];
    return [...before, ...said, { role: "user", content: prompt }];
  }

  /** Sends a request, as a new turn; `compare`: and then the same one without guesses. */
  async send(path, body, asked, compare, shown = asked) {
    const run = new Run(path, body, body.speculation.gamma === 0);
    const inline = "prompt" in body;
    const turn = new TurnView(
      { asked, shown, run, inline, seed: body.seed },
      {
        compare: () => this.#compare(turn),
        goOn: () => this.#goOn(turn),
        retry: () => this.#retry(turn),
      },
    );
    this.turns.push(turn);
    this.element.append(turn.element);
    await this.#read(turn, run);
    if (compare && run.state === "done" && !run.plain) await this.#compare(turn);
  }

  stop() {
    for (const run of this.runs) run.stop();
  }

  #compare(turn) {
    const { path, body } = turn.run;
    const run = new Run(path, { ...body, speculation: { ...body.speculation, gamma: 0 } }, true);
    turn.compare(run);
    return this.#read(turn, run);
  }

  #goOn({ run, asked }) {
    const prompt = asked + run.text;
    const tail =
      prompt.length > REMEMBERED ? `…${prompt.slice(-REMEMBERED).replace(/^\S*/, "")}` : prompt;
    this.send(run.path, { ...run.body, prompt }, prompt, false, tail);
  }

  #retry(turn) {
    this.turns.splice(this.turns.indexOf(turn), 1);
    turn.element.remove();
    this.send(turn.run.path, turn.run.body, turn.asked, false, turn.shown);
  }

  async #read(turn, run) {
    this.changed(this);
    await run.read(() => {
      turn.draw();
      this.changed(this);
    });
    this.ended(run);
  }
}
