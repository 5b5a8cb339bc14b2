// The measurements next to the output, and two small charts. Every bar has its number next to it,
// so that neither colour nor length is needed to read them.

import { el } from "./dom.js";
import { UNKNOWN, count, duration, measures, rate, shown, speedup } from "./run.js";

const WHAT =
  "Predicted by Theorem 3.8 for one sequence, from the α, c and v below and the server's numbers of draft tokens per step so far.";
const WHEN = "To measure it on this page, decode an output plainly too.";

/** run: the run whose measurements are shown, if any; pairs: runs of the same request with draft
 * tokens and plainly; info: the answer of /v1/speculation. */
export function drawPanel($, run, pairs, info) {
  const m = run?.steps.length ? measures(run) : null;
  $("this").replaceChildren(
    ...(m ? figures(m) : [el("p", { class: "none" }, "No output yet.")]),
  );
  $("positions").replaceChildren(acceptance(m?.positions ?? []));
  const here = speedup(pairs);
  const rows = [
    ["Predicted", info?.predicted_speedup ?? null, "predicted"],
    ["Measured on this page", here.factor, "measured"],
  ];
  const notes = [info?.predicted_speedup ? WHAT : "", pageOn(here)].filter(Boolean);
  $("speedups").replaceChildren(factors(rows), ...notes.map((note) => el("p", { class: "note" }, note)));
}

function pageOn({ texts }) {
  return texts ? `Measured on ${count(texts, "output")}, decoded both ways.` : WHEN;
}

function figures(m) {
  const drafted = m.drafted
    ? `${shown(m.accepted)} of ${shown(m.drafted)} draft tokens accepted`
    : "no draft tokens";
  const more = [
    ["Tokens", shown(m.tokens)],
    ["Speed", rate(m.perSecond)],
    ["Engine time", duration(m.seconds)],
    ["Overlap, α", m.alpha === null ? null : shown(m.alpha, 2)],
  ];
  if (m.mates) more.push(["Batched with", count(m.mates, "other sequence")]);
  return [
    el(
      "p",
      { class: "hero" },
      el("strong", {}, shown(m.perCall, 2)),
      " tokens per target call",
    ),
    el("p", { class: "note" }, `${count(m.calls, "target call")}, ${drafted}`),
    el("dl", {}, ...described(more)),
  ];
}

/** Names and values as items of a description list. */
export function described(facts) {
  return facts.map(([name, value]) => {
    const known = value !== null && value !== undefined;
    const told = el("dd", { class: known ? null : "none" }, known ? `${value}` : UNKNOWN);
    return el("div", {}, el("dt", {}, name), told);
  });
}

function bar(share, kind) {
  const fill = el("span", { class: `fill ${kind}` });
  fill.style.width = `${100 * Math.min(Math.max(share, 0), 1)}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, fill);
}

/** positions: numbers of draft tokens proposed and accepted at each position of a block. */
function acceptance(positions) {
  if (!positions.length) return el("p", { class: "none" }, "No draft tokens yet.");
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
    "Share of the draft tokens accepted, by position in the block",
  );
  return el(
    "table",
    { class: rows.length > 6 ? "chart dense" : "chart" },
    caption,
    el("tbody", {}, ...rows),
  );
}

/** speedups: names and factors, null where not measured; plain decoding is 1. */
function factors(speedups) {
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
