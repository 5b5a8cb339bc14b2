// The measurements beside the text, and what the server says of itself.

import { acceptance, factors } from "./charts.js";
import { el } from "./dom.js";
import { UNKNOWN, count, duration, measures, rate, shown, speedup } from "./numbers.js";

const WHAT =
  "Predicted: by Theorem 3.8, for one text with as many guesses as the server has made, from the α, c and v below.";
const WHEN = "For this page's own number, decode a text plainly too.";

/** run: whose measurements are shown, if any; pairs: the page's texts that were decoded both with
 * guesses and plainly; info: what the server says. */
export function drawPanel($, run, pairs, info) {
  const m = run?.steps.length ? measures(run) : null;
  $("this").replaceChildren(
    ...(m ? figures(m) : [el("p", { class: "none" }, "Nothing written yet.")]),
  );
  $("positions").replaceChildren(acceptance(m?.positions ?? []));
  const here = speedup(pairs);
  const rows = [
    ["Predicted", info?.predicted_speedup ?? null, "predicted"],
    ["Measured by the server", info?.measured_speedup ?? null, "measured"],
    ["Measured on this page", here.factor, "measured"],
  ];
  const notes = [info?.predicted_speedup ? WHAT : "", measuredOn(info), pageOn(here)].filter(Boolean);
  $("speedups").replaceChildren(factors(rows), ...notes.map((note) => el("p", { class: "note" }, note)));
}

/** From how many texts the server's number is. */
function measuredOn(info) {
  const texts = info?.measured_texts;
  if (!texts?.speculative) return "";
  const guessed = count(texts.speculative, "text");
  return `The server's: ${guessed} against ${shown(texts.plain)} asked for plainly, with the same settings.`;
}

function pageOn({ texts }) {
  return texts ? `This page's: ${count(texts, "text")}, decoded both ways.` : WHEN;
}

function figures(m) {
  const guesses = m.drafted
    ? `${shown(m.accepted)} of ${shown(m.drafted)} guesses kept`
    : "no guesses";
  const more = [
    ["Tokens", shown(m.tokens)],
    ["Speed", rate(m.perSecond)],
    ["Engine time", duration(m.seconds)],
    ["Overlap, α", m.alpha === null ? null : shown(m.alpha, 2)],
  ];
  if (m.mates) more.push(["Runs shared with", count(m.mates, "other text")]);
  return [
    el(
      "p",
      { class: "hero" },
      el("strong", {}, shown(m.perCall, 2)),
      " tokens per run of the target",
    ),
    el("p", { class: "note" }, `${count(m.calls, "run")}, ${guesses}`),
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
