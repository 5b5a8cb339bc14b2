// Attachments of the next prompt: images and audio that the user chooses, pastes, drops or records,
// of the kinds that the model supports.

import { el } from "./dom.js";
import { READERS, dataUrl, recording, view } from "./media.js";

const NAMES = { image: "image", audio: "audio file" };

export class Attachments {
  #kinds = []; // supported by the model
  #items = []; // each with kind, name and element; once loaded, also file and url
  #recording = null;

  /** composer: the form that sends them; changed: called on every change. */
  constructor(composer, changed) {
    Object.assign(this, { composer, changed });
    const ids = ["#attached", "#file", "#unread", "#record", "#prompt"];
    const parts = ids.map((id) => composer.querySelector(id));
    [this.list, this.input, this.problem, this.record, this.prompt] = parts;
    this.buttons = [...composer.querySelectorAll("[data-kind]")];
    const choose = ({ currentTarget: { dataset } }) => {
      Object.assign(this.input, { accept: `${dataset.kind}/*`, multiple: !this.one });
      this.input.click();
    };
    const record = () => this.stop() || this.#record();
    for (const button of this.buttons) {
      button.addEventListener("click", button === this.record ? record : choose);
    }
    this.input.addEventListener("change", () => {
      this.#attach(this.input.files);
      this.input.value = ""; // so that the same file may be chosen again
      this.prompt.focus();
    });
    document.addEventListener("paste", (event) => {
      const { types, files } = event.clipboardData;
      const office = ["text/plain", "text/html"].every((type) => types.includes(type));
      if (!office) this.#given(event, files); // office programs paste text with an image of it
    });
    document.addEventListener("drop", (event) => this.#given(event, event.dataTransfer.files));
    document.addEventListener("dragover", (event) => {
      if (this.#kinds.length && event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
  }

  /** Update the buttons for the media that the model supports. */
  follow({ chat, media, transcribes }) {
    this.one = transcribes;
    this.#kinds = transcribes ? ["audio"] : chat ? media : [];
    for (const button of this.buttons) button.hidden = !this.#kinds.includes(button.dataset.kind);
    // Browsers give pages over plain HTTP from another host no microphone
    this.record.hidden ||= !navigator.mediaDevices;
  }

  /** Whether an attachment is still loading or being recorded. */
  get busy() {
    return this.#recording !== null || this.#items.some(({ url }) => !url);
  }

  get size() {
    return this.#items.length;
  }

  /** Remove and return all attachments. */
  take() {
    const taken = this.#items;
    this.#items = [];
    this.list.replaceChildren();
    this.problem.textContent = "";
    return taken;
  }

  /** Stop a recording; return whether there was one. */
  stop() {
    this.#recording?.then(({ stop }) => stop(), () => {});
    return this.#recording !== null;
  }

  #given(event, files) {
    if (!this.#kinds.length || !files.length) return;
    event.preventDefault();
    this.#attach(files);
  }

  #attach(files) {
    this.problem.textContent = "";
    return Promise.all([...files].map((file) => this.#read(file)));
  }

  async #read(file) {
    const kind = file.type.startsWith("image/") ? "image" : "audio";
    if (!this.#kinds.includes(kind)) {
      const names = this.#kinds.map((each) => NAMES[each]);
      this.problem.textContent = `${file.name} is not an ${names.join(" or ")}.`;
      return;
    }
    if (this.one) this.take();
    const item = { kind, name: file.name, element: el("li", {}, `Loading ${file.name}`) };
    this.#items.push(item);
    this.list.append(item.element);
    this.changed();
    try {
      item.file = await READERS[kind](file);
      item.url = await dataUrl(item.file);
      const name = `Remove: ${item.name}`;
      const onclick = () => this.#remove(item);
      const button = el("button", { type: "button", "aria-label": name, title: name, onclick }, "×");
      item.element.replaceChildren(view(item), button);
    } catch (error) {
      this.#remove(item);
      this.problem.textContent = `${file.name} cannot be decoded as an ${NAMES[kind]}: ${error.message}`;
    }
    this.changed();
  }

  #remove(item) {
    const focused = item.element.contains(document.activeElement);
    this.#items = this.#items.filter((each) => each !== item);
    item.element.remove();
    if (focused) this.composer.querySelector("button:not([hidden])").focus(); // the focused button was removed
  }

  async #record() {
    this.#recording = recording();
    this.problem.textContent = "";
    try {
      const { file } = await this.#recording;
      this.#say("Stop recording");
      const made = await file;
      this.#recording = null;
      await this.#attach([made]);
    } catch (error) {
      this.#recording = null;
      this.problem.textContent = `The microphone cannot be used: ${error.message}.`;
    }
    this.#say("Record");
  }

  /** Set the record button's name, and show whether it is recording. */
  #say(name) {
    this.record.classList.toggle("on", this.#recording !== null);
    this.record.querySelector("span").textContent = this.record.title = name;
    this.changed();
  }
}
