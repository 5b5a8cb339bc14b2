// Conversations: lists of turns, of which the last may be running. They are independent, so each
// streams whether it is shown or not. And the list of conversations, each with a button that stops
// it while it runs and removes it otherwise.

import { el } from "./dom.js";
import { part } from "./media.js";
import { Run, count } from "./run.js";
import { TurnView } from "./turn.js";

const TITLE = 48; // characters of the first prompt
const REMEMBERED = 240; // characters shown again of a text that is continued

export class Conversation {
  turns = [];
  element = document.createElement("div");

  /** changed: called on every chunk; ended(run): called at the end of an output. */
  constructor(changed, ended) {
    Object.assign(this, { changed, ended });
  }

  get title() {
    const { asked, media } = this.turns[0] ?? { asked: "New conversation" };
    const first = (asked || media[0].name).replace(/\s+/g, " ").trim();
    return first.length > TITLE ? `${first.slice(0, TITLE).trimEnd()}…` : first;
  }

  get last() {
    return this.turns.at(-1);
  }

  get runs() {
    return this.turns.flatMap((turn) => [turn.run, ...(turn.plain ? [turn.plain.run] : [])]);
  }

  /** Runs of the same request, with draft tokens and plainly. */
  get pairs() {
    return this.turns.filter((turn) => turn.plain).map(({ run, plain }) => [run, plain.run]);
  }

  get open() {
    return this.runs.some((run) => run.open);
  }

  /** The messages of a chat request: the conversation so far, then the prompt, unless it is empty
   * because results of tool calls are sent. */
  messages(system, prompt, media) {
    const message = (role, content) => (content ? [{ role, content }] : []);
    const user = ({ asked, media }) => {
      const text = asked ? [{ type: "text", text: asked }] : [];
      return message("user", media.length ? [...media.map(part), ...text] : asked);
    };
    const said = this.turns
      .filter(({ run }) => run.said)
      .flatMap((turn) => [...user(turn), ...turn.run.messages]);
    return [...message("system", system), ...said, ...user({ asked: prompt, media })];
  }

  /** Send a request, as a new turn; `compare`: then repeat it without draft tokens. */
  async send(path, body, { asked = "", media = [], shown = asked }, compare = false) {
    const run = new Run(path, body, body.speculation?.gamma === 0);
    const inline = !body.messages;
    const turn = new TurnView(
      { asked, media, shown, run, inline, seed: body.seed },
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
    this.send(run.path, { ...run.body, prompt }, { asked: prompt, shown: tail });
  }

  #retry(turn) {
    this.turns.splice(this.turns.indexOf(turn), 1);
    turn.element.remove();
    this.send(turn.run.path, turn.run.body, turn);
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

export class List {
  #items = new Map(); // by conversation

  /** act: functions `show` and `remove`, which take a conversation. */
  constructor(element, act) {
    Object.assign(this, { element, act });
  }

  /** Update the list. Unchanged elements stay: replacing a button between press and release would
   * lose the click, and the focus. */
  draw(conversations, current) {
    for (const conversation of this.#items.keys()) {
      if (conversations.includes(conversation)) continue;
      this.#items.get(conversation).element.remove();
      this.#items.delete(conversation);
    }
    conversations.forEach((conversation, i) => {
      if (!this.#items.has(conversation)) {
        this.#items.set(conversation, new Item(conversation, this.act));
      }
      const item = this.#items.get(conversation);
      item.draw(conversation === current);
      const there = this.element.children[i] ?? null;
      if (there !== item.element) this.element.insertBefore(item.element, there);
    });
  }
}

class Item {
  #drawn = "";
  #title = el("span");
  #state = el("small");

  constructor(conversation, act) {
    this.conversation = conversation;
    const show = () => act.show(conversation);
    const name = el("button", { type: "button", class: "title", onclick: show });
    name.append(this.#title, this.#state);
    // two buttons, so that a click that begins on one cannot end on the other
    this.stop = button("■", () => conversation.stop());
    this.remove = button("×", () => act.remove(conversation));
    this.element = el("li", {}, name);
  }

  draw(isCurrent) {
    const { title, open, turns } = this.conversation;
    const drawn = JSON.stringify([title, open, isCurrent, turns.length]);
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    this.element.classList.toggle("open", open);
    if (isCurrent) this.element.setAttribute("aria-current", "true");
    else this.element.removeAttribute("aria-current");
    this.#title.textContent = title;
    this.#state.textContent = open ? "generating" : turns.length ? count(turns.length, "turn") : "empty";
    label(this.stop, `Stop: ${title}`);
    label(this.remove, `Remove: ${title}`);
    this.#place(this.stop, open);
    this.#place(this.remove, !open && turns.length > 0);
  }

  #place(ending, wanted) {
    if (wanted === (ending.parentNode === this.element)) return;
    if (wanted) this.element.append(ending);
    else ending.remove();
  }
}

function button(sign, onclick) {
  return el("button", { type: "button", class: "quiet", onclick }, sign);
}

function label(element, name) {
  element.setAttribute("aria-label", name);
  element.title = name;
}
