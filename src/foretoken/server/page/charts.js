// The two small charts beside the text, drawn by hand. Every bar has its number next to it, so that
// neither colour nor length is needed to read them.

import { el } from "./dom.js";
import { UNKNOWN, shown } from "./numbers.js";

function bar(share, kind) {
  const fill = el("span", { class: `fill ${kind}` });
  fill.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

/** positions: how many guesses were made and kept at each place of a block. */
export function acceptance(positions) {
  if (!positions.length) return el("p", { class: "none" }, "No guesses yet.");
  const rows = positions.map(({ made, kept }, i) => {
    const number = el(
      "td",
      {},
      shown((100 * kept) / made, 0, " %"),
      el("small", {}, ` of ${shown(made)}`),
    );
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, `${i + 1}`),
      el("td", {}, bar(kept / made, "kept")),
      number,
    );
  });
  const caption = el(
    "caption",
    { class: "hidden" },
    "Share of the guesses kept, by position in the block",
  );
  return el(
    "table",
    { class: rows.length > 6 ? "chart dense" : "chart" },
    caption,
    el("tbody", {}, ...rows),
  );
}

/** speedups: names and factors, null where not measured; plain decoding is 1. */
export function factors(speedups) {
  const most = Math.max(2, ...speedups.map(([, factor]) => factor ?? 0)) * 1.04;
  const items = speedups.map(([name, factor, kind]) => {
    const drawn = bar((factor ?? 0) / most, kind);
    const one = el("span", { class: "one" });
    one.style.left = `${100 / most}%`;
    drawn.append(one);
    const known = factor !== null;
    const value = el(
      "dd",
      { class: known ? null : "none" },
      known ? shown(factor, 2, "×") : UNKNOWN,
    );
    return el("div", {}, el("dt", {}, name), value, drawn);
  });
  return el("dl", { class: "factors" }, ...items);
}
