// Timeline of drafter and target, from the records of the steps: a lane for each, and one below for
// plain decoding on the same scale. Time between steps is left out. Bars are only appended; the
// drawing is stretched to the available width.

import { el, svg } from "./dom.js";
import { count, duration, took } from "./run.js";
import { told } from "./tokens.js";

const LANES = { draft: [2, 12], target: [20, 12], plain: [42, 12] }; // top, height
const NARROWEST = 3; // minimum pixels per step; a longer timeline scrolls
const HINT = "Point at a step, or use the arrow keys, to see its details.";

export class Timeline {
  #runs = new Map(); // run -> steps and seconds that are drawn
  #selected = null;

  /** select: called with the index of the step under the pointer, or null. */
  constructor(select) {
    this.select = select;
    this.chart = svg("svg", { preserveAspectRatio: "none", role: "img" });
    this.axis = el("div", { class: "axis", "aria-hidden": "true" });
    this.scale = el("div", { class: "scale" }, this.chart, this.axis);
    const label = "Timeline of draft and target; arrow keys move between steps";
    this.scroller = el(
      "div",
      { class: "scroller", tabindex: 0, role: "group", "aria-label": label },
      this.scale,
    );
    this.names = el("div", { class: "lanes", "aria-hidden": "true" });
    this.readout = el("p", { class: "readout" });
    this.element = el(
      "figure",
      { class: "timeline", hidden: true },
      el("div", { class: "tracks" }, this.names, this.scroller),
      this.readout,
    );
    this.chart.addEventListener("pointerover", (event) => this.#point(event.target.dataset.step));
    this.chart.addEventListener("pointerleave", () => this.#point());
    this.scroller.addEventListener("keydown", (event) => this.#walk(event));
    // Screen readers announce the line below only while the arrow keys are used.
    this.scroller.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.scroller.addEventListener("blur", () => {
      this.readout.removeAttribute("aria-live");
      this.#point();
    });
  }

  update(drafted, plain) {
    const lines = [drafted, plain].filter((run) => run?.steps.length);
    this.element.hidden = !lines.length;
    if (!lines.length) return;
    this.steps = drafted.steps;
    this.#forget(lines);
    const open = lines.some((run) => run.open);
    const following = this.#atEnd();
    for (const run of lines) this.#append(run);
    this.#stretch();
    if (!open) this.scroller.scrollLeft = 0;
    else if (following) this.scroller.scrollLeft = this.scroller.scrollWidth;
    this.#describe();
  }

  /** Mark a step and show its details; null removes the mark. */
  mark(number) {
    if (number === this.#selected) return;
    for (const bar of this.chart.querySelectorAll(".on")) bar.classList.remove("on");
    this.#selected = number;
    if (number === null) return this.#describe();
    const bars = this.chart.querySelectorAll(`[data-step="${number}"]`);
    for (const bar of bars) bar.classList.add("on");
    this.readout.textContent = told(this.steps[number], number);
  }

  /** Clear the drawing if a run has been replaced by another. */
  #forget(lines) {
    if ([...this.#runs.keys()].every((run) => lines.includes(run))) return;
    this.#runs.clear();
    this.chart.replaceChildren();
  }

  #append(run) {
    const drawn = this.#runs.get(run) ?? { steps: 0, seconds: 0 };
    for (const step of run.steps.slice(drawn.steps)) {
      const number = run.steps === this.steps ? drawn.steps : null; // only this run's steps can be marked
      this.chart.append(...bars(step, drawn.seconds, run.plain ? "plain" : "target", number));
      drawn.seconds += took(step);
      drawn.steps += 1;
    }
    this.#runs.set(run, drawn);
  }

  #stretch() {
    const drawn = [...this.#runs.values()];
    const kinds = [...this.#runs.keys()].map((run) => run.plain);
    const names = kinds.includes(false) ? ["draft", "target"] : [];
    if (kinds.includes(true)) names.push("plain");
    const top = LANES[names[0]][0] - 2;
    const height = LANES[names.at(-1)][0] + LANES[names.at(-1)][1] + 2 - top;
    this.seconds = Math.max(...drawn.map((line) => line.seconds));
    this.chart.setAttribute("viewBox", `0 ${top} ${this.seconds * 1000} ${height}`);
    this.chart.style.height = `${height}px`;
    this.scale.style.minWidth = `${Math.max(...drawn.map((line) => line.steps)) * NARROWEST}px`;
    this.names.replaceChildren(...names.map((name) => el("span", { class: name }, name)));
    this.axis.replaceChildren(
      ...ticks(this.seconds, this.scale.clientWidth).map((at) => this.#tick(at)),
    );
  }

  #tick(at) {
    const rounded = at < 1 ? `${+(at * 1000).toPrecision(3)} ms` : `${+at.toPrecision(3)} s`;
    const mark = el("span", {}, at ? rounded : "0");
    mark.style.left = `${(100 * at) / this.seconds}%`;
    return mark;
  }

  #describe() {
    const parts = [...this.#runs.entries()].map(([run, { seconds, steps }]) => {
      const kind = run.plain ? "Plain decoding" : "Speculative decoding";
      return `${kind}: ${count(steps, "target call")} in ${duration(seconds)}`;
    });
    this.chart.setAttribute("aria-label", parts.join(". "));
    if (this.#selected === null) this.readout.textContent = HINT;
  }

  #atEnd() {
    const { scrollLeft, scrollWidth, clientWidth } = this.scroller;
    return scrollLeft + clientWidth >= scrollWidth - 24;
  }

  #point(number) {
    this.select(number === undefined ? null : Number(number));
  }

  #walk(event) {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way) return;
    event.preventDefault();
    const from = this.#selected ?? (way > 0 ? -1 : this.steps.length);
    const to = Math.min(Math.max(from + way, 0), this.steps.length - 1);
    this.select(to);
    this.chart
      .querySelector(`[data-step="${to}"].target, [data-step="${to}"].plain`)
      .scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

function bars(step, from, lane, number) {
  const at = { draft: from, [lane]: from + step.draft_seconds };
  at.verify = at[lane] + step.target_seconds;
  const bar = (kind, row, seconds) => {
    const [y, height] = LANES[row];
    const place = { x: at[kind] * 1000, y, width: seconds * 1000, height };
    return svg("rect", { class: kind, "data-step": number, ...place });
  };
  return [
    bar(lane, lane, step.target_seconds),
    bar("verify", lane, step.verify_seconds),
    ...(step.gamma ? [bar("draft", "draft", step.draft_seconds)] : []),
  ];
}

/** Return round times from 0 on, about 90 pixels apart, if there is room for their labels. */
function ticks(seconds, width) {
  const least = (seconds * 90) / Math.max(width, 90);
  const power = 10 ** Math.floor(Math.log10(least));
  const apart = [1, 2, 5, 10].map((n) => n * power).find((gap) => gap >= least);
  const last = seconds * (1 - 50 / Math.max(width, 90));
  return Array.from({ length: Math.max(1, Math.floor(last / apart) + 1) }, (_, i) => i * apart);
}
