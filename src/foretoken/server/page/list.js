// The conversations, each with a button that stops it while it writes and removes it otherwise.

import { el } from "./dom.js";
import { count } from "./numbers.js";

export class List {
  #drawn = "";

  /** act: `show` and `remove`, of a conversation. */
  constructor(element, act) {
    Object.assign(this, { element, act });
  }

  draw(conversations, current) {
    const states = conversations.map((c) => [c.title, c.open, c === current, c.turns.length]);
    const drawn = JSON.stringify(states);
    if (drawn === this.#drawn) return; // replaced buttons would lose the focus
    this.#drawn = drawn;
    this.element.replaceChildren(...conversations.map((c) => this.#item(c, c === current)));
  }

  #item(conversation, isCurrent) {
    const { title, open, turns } = conversation;
    const state = open ? "writing" : turns.length ? count(turns.length, "text") : "empty";
    const show = () => this.act.show(conversation);
    const name = el(
      "button",
      { type: "button", class: "title", onclick: show },
      title,
      el("small", {}, state),
    );
    const item = { class: open ? "open" : null, "aria-current": isCurrent ? "true" : null };
    return el("li", item, name, ...(turns.length ? [this.#ending(conversation)] : []));
  }

  #ending(conversation) {
    const { open, title } = conversation;
    const name = `${open ? "Stop" : "Remove"}: ${title}`;
    const onclick = () => (open ? conversation.stop() : this.act.remove(conversation));
    return el(
      "button",
      { type: "button", class: "quiet", "aria-label": name, title: name, onclick },
      open ? "■" : "×",
    );
  }
}
