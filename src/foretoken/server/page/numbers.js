// What steps add up to, and how numbers are written. Knows no page.

/** Of a run, so far: tokens, calls, seconds, and how many guesses were kept at each position. */
export function measures(run) {
  const { steps, totals } = run;
  const tokens = sum(steps, (step) => step.tokens.length);
  const made = [];
  const kept = [];
  for (const step of steps) {
    const accepted = step.tokens.filter((token) => token.source === "accepted").length;
    for (let i = 0; i < accepted + step.rejected.length; i++) {
      made[i] = (made[i] ?? 0) + 1;
      kept[i] = (kept[i] ?? 0) + (i < accepted ? 1 : 0);
    }
  }
  const overlaps = steps.flatMap((step) => step.overlaps ?? []);
  const seconds = totals?.seconds ?? sum(steps, took);
  return {
    tokens,
    seconds,
    calls: steps.length,
    perCall: steps.length ? tokens / steps.length : null,
    perSecond: seconds ? tokens / seconds : null,
    drafted: sum(made, (n) => n),
    accepted: sum(kept, (n) => n),
    positions: made.map((n, i) => ({ made: n, kept: kept[i] })),
    alpha: overlaps.length ? sum(overlaps, (x) => x) / overlaps.length : null,
    mates: Math.max(0, ...steps.map((step) => step.rows ?? 1)) - 1,
  };
}

/** How much faster runs with guesses made tokens than those without; null before both are there. */
export function speedup(runs) {
  const speed = (group) => {
    const all = group.map(measures);
    return sum(all, (m) => m.tokens) / sum(all, (m) => m.seconds);
  };
  const done = runs.filter((run) => run.state === "done" && run.steps.length);
  const guessed = done.filter((run) => !run.plain);
  const plain = done.filter((run) => run.plain);
  return guessed.length && plain.length ? speed(guessed) / speed(plain) : null;
}

/** Seconds of a step. */
export function took(step) {
  return step.draft_seconds + step.target_seconds + step.verify_seconds;
}

export function sum(list, value) {
  return list.reduce((total, item) => total + value(item), 0);
}

export const UNKNOWN = "not measured yet";

/** `digits` behind the point, then the unit; what was not measured says so. */
export function shown(value, digits = 0, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  const number = value.toLocaleString("en", {
    minimumFractionDigits: digits,
    maximumFractionDigits: digits,
  });
  return number + unit;
}

export function rate(perSecond) {
  return shown(perSecond, perSecond < 100 ? 1 : 0, " tokens/s");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.01) return shown(seconds * 1000, 1, " ms");
  if (seconds < 1) return shown(seconds * 1000, 0, " ms");
  return shown(seconds, seconds < 10 ? 2 : 1, " s");
}

export function count(n, noun) {
  return `${shown(n)} ${noun}${n === 1 ? "" : "s"}`;
}
