// The conversations, each with a button that stops it while it writes and removes it otherwise.

import { el } from "./dom.js";
import { count } from "./numbers.js";

export class List {
  #items = new Map(); // by conversation

  /** act: `show` and `remove`, of a conversation. */
  constructor(element, act) {
    Object.assign(this, { element, act });
  }

  /** Update what has changed. Elements stay: a click is lost when its button is replaced between
   * press and release, and so is the focus. */
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
    // two buttons, so that a click that begins on the one never ends as the other's
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
    this.#state.textContent = open ? "writing" : turns.length ? count(turns.length, "text") : "empty";
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
