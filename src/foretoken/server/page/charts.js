// The two small charts beside the text, drawn by hand. Every bar has its number in words next to it,
// so that neither colour nor length is needed to read them.

import { el } from "./dom.js";
import { UNKNOWN, shown } from "./numbers.js";

function bar(share, kind) {
  const fill = el("span", { class: `fill ${kind}` });
  fill.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

function row(name, drawn, value, note) {
  const number = el("td", { class: "number" }, value);
  if (note) number.append(el("small", {}, note));
  return el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "drawn" }, drawn), number);
}

function table(caption, rows) {
  return el("table", { class: "chart" }, el("caption", { class: "hidden" }, caption), el("tbody", {}, ...rows));
}

/** positions: how many guesses were made and kept at each place of a block. */
export function acceptance(positions) {
  if (!positions.length) return el("p", { class: "none" }, "No guesses yet.");
  const rows = positions.map(({ made, kept }, i) =>
    row(`${i + 1}`, bar(kept / made, "kept"), shown((100 * kept) / made, 0, " %"), ` of ${shown(made)}`),
  );
  return table("Share of the guesses kept, by position in the block", rows);
}

/** speedups: names and factors, null where not measured; plain decoding is 1. */
export function factors(speedups) {
  const most = Math.max(2, ...speedups.map(([, factor]) => factor ?? 0)) * 1.04;
  const rows = speedups.map(([name, factor, kind]) => {
    const drawn = bar((factor ?? 0) / most, factor === null ? "empty" : kind);
    const one = el("span", { class: "one" });
    one.style.left = `${100 / most}%`;
    drawn.append(one);
    return row(name, drawn, factor === null ? UNKNOWN : shown(factor, 2, "×"));
  });
  return table("How many times as fast as plain decoding", rows);
}
