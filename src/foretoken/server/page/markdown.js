// Markdown as elements: the subset that models use. Their output only becomes the text of elements
// or the URL of a link to the web, never markup of the page.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6}) +(.+)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(?=\S)/;
const DIVIDER = /^ *\|?( *:?-+:? *\|)+( *:?-+:?)? *$/;
const STARTS = [FENCE, HEADING, RULE, QUOTE, ITEM];
const DEEPEST = 8; // nested quotes and lists

// The lengths are limited, so that a text of nothing but asterisks is parsed fast enough
const INLINE = new RegExp(
  [
    /\\(?<escaped>[!-/:-@[-`{-~])/,
    /(?<ticks>`{1,3})(?<code>[^`]{1,2000})\k<ticks>(?!`)/,
    /\[(?<label>[^\]\n]{1,400})\]\((?<address>(?:https?:\/\/|mailto:)[^\s()<>]{1,2000})\)/,
    /(?<two>\*\*|(?<!\w)__)(?=\S)(?<strong>.{1,400}?)(?<=\S)\k<two>(?!\w?_)/,
    /(?<one>\*|(?<!\w)_)(?=[^\s*_])(?<em>[^*\n]{1,400}?)(?<=\S)\k<one>(?![\w*])/,
    /~~(?=\S)(?<del>.{1,400}?)(?<=\S)~~/,
  ]
    .map(({ source }) => source)
    .join("|"),
  "gi",
);

/** Return a text as elements; a text that is still generated may end within any of them. */
export function markdown(text) {
  return blocks(text.replace(/\t/g, "    ").split(/\r?\n/), 0);
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  /** Return the next line and those after it while `belongs` is true of them. */
  const taken = (belongs) => {
    const start = at++;
    while (at < lines.length && belongs(lines[at], at)) at++;
    return lines.slice(start, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const deep = depth < DEEPEST;
    const fence = line.match(FENCE)?.[1];
    const heading = line.match(HEADING);
    if (!line.trim()) at++;
    else if (fence) {
      const code = taken((next) => !isClosing(next, fence)).slice(1);
      at++;
      made.push(el("pre", { tabindex: 0 }, el("code", {}, code.join("\n"))));
    } else if (heading) {
      at++;
      const level = Math.min(6, heading[1].length + 2); // the page itself uses two levels
      made.push(el(`h${level}`, {}, ...inline(heading[2].replace(/ #+ *$/, ""))));
    } else if (RULE.test(line)) {
      at++;
      made.push(el("hr"));
    } else if (deep && QUOTE.test(line)) {
      const quoted = taken((next) => QUOTE.test(next)).map((each) => each.replace(QUOTE, ""));
      made.push(el("blockquote", {}, ...blocks(quoted, depth + 1)));
    } else if (deep && ITEM.test(line)) {
      const bullet = isBullet(line);
      const indent = indentOf(line);
      made.push(list(taken((_, i) => isOfList(lines, i, indent, bullet)), depth));
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) {
      made.push(table(taken((next) => next.includes("|"))));
    } else {
      const isText = (next, i) =>
        next.trim() &&
        !STARTS.some((start) => start.test(next)) &&
        !(next.includes("|") && DIVIDER.test(lines[i + 1] ?? ""));
      made.push(el("p", {}, ...inline(taken(isText).join("\n").trim())));
    }
  }
  return made;
}

function isClosing(line, fence) {
  return line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
}

function isBullet(line) {
  return /[-*+]/.test(line.trim()[0]);
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

/** Return whether line i is part of a list with this indentation: an item, a line with more
 * indentation, or a blank line between. */
function isOfList(lines, i, indent, bullet) {
  const blank = !lines[i].trim();
  const line = blank ? lines.slice(i).find((each) => each.trim()) : lines[i];
  if (!line || RULE.test(line)) return false;
  if (indentOf(line) > indent) return true;
  if (ITEM.test(line)) return indentOf(line) === indent && isBullet(line) === bullet;
  return !blank && Boolean(lines[i - 1].trim()) && !STARTS.some((start) => start.test(line));
}

function list(lines, depth) {
  const indent = indentOf(lines[0]);
  const items = [];
  for (const line of lines) {
    const marker = line.match(ITEM);
    if (marker && indentOf(line) === indent) {
      items.push({ width: marker[0].length, lines: [line.slice(marker[0].length)] });
    } else {
      const { width, lines: own } = items.at(-1);
      own.push(line.slice(Math.min(width, indentOf(line))));
    }
  }
  const number = parseInt(lines[0], 10);
  const tag = isBullet(lines[0]) ? "ul" : "ol";
  const start = tag === "ol" && number !== 1 ? number : null;
  return el(tag, { start }, ...items.map((item) => el("li", {}, ...blocks(item.lines, depth + 1))));
}

function table([head, , ...rows]) {
  const cells = (line, tag) =>
    line
      .trim()
      .replace(/^\||\|$/g, "")
      .split("|")
      .map((cell) => el(tag, {}, ...inline(cell.trim())));
  const body = rows.map((row) => el("tr", {}, ...cells(row, "td")));
  const made = el("table", {}, el("thead", {}, el("tr", {}, ...cells(head, "th"))), el("tbody", {}, ...body));
  return el("div", { class: "wide-table" }, made);
}

function inline(text) {
  const made = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    made.push(text.slice(at, match.index), marked(match.groups));
    at = match.index + match[0].length;
  }
  return [...made, text.slice(at)];
}

function marked({ escaped, code, label, address, strong, em, del }) {
  if (escaped) return escaped;
  if (code) return el("code", {}, code);
  if (strong) return el("strong", {}, ...inline(strong));
  if (em) return el("em", {}, ...inline(em));
  if (del) return el("del", {}, ...inline(del));
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label);
}
