// The page: conversations and their list, the prompt, what the server says, and the measurements of
// the text that is shown. What each part looks like is its own module's.

import { acceptance, factors } from "./charts.js";
import { Conversation } from "./conversation.js";
import { el, nextFrame, paced } from "./dom.js";
import { UNKNOWN, count, duration, measures, shown, speedup } from "./numbers.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { key } from "./stream.js";

const EXAMPLES = {
  true: ["Why is the sky blue?", "Write four lines about the first snow.", "What is rejection sampling?"],
  false: ["The captain looked", "It was a cold morning in November, and", "“My dear,” said the old gentleman,"],
};
const ERRORS = { 503: "The engine is loading.", 0: "The server does not answer." };

const $ = (id) => document.getElementById(id);
const settings = new Settings($("settings"));
const server = new Server(serverTold);
const conversations = [];
let current = null;
let ready = false;

// Conversations

function begin() {
  const empty = conversations.find((conversation) => !conversation.turns.length);
  const conversation = empty ?? new Conversation(changed, ended);
  if (!empty) conversations.unshift(conversation);
  show(conversation);
  $("prompt").focus();
}

function show(conversation) {
  current = conversation;
  $("turns").replaceChildren(conversation.element);
  $("thread").scrollTop = $("thread").scrollHeight;
  closeDrawer();
  changed(conversation);
}

function remove(conversation) {
  conversation.stop();
  conversations.splice(conversations.indexOf(conversation), 1);
  if (conversation === current) conversations.length ? show(conversations[0]) : begin();
  drawList();
}

function changed(conversation) {
  drawList();
  if (conversation !== current) return;
  drawThread();
  drawMeasures();
}

function ended(run) {
  const outcome = run.error ? `Failed: ${run.error.message}` : run.state === "stopped" ? "Stopped." : run.text;
  $("announcer").append(el("p", {}, run.plain ? `Plain decoding: ${run.error ? outcome : "finished."}` : outcome));
  while ($("announcer").children.length > 3) $("announcer").firstChild.remove();
  server.ask();
}

// What is drawn

const drawThread = nextFrame(() => {
  $("empty").hidden = current.turns.length > 0;
  $("send").textContent = current.open ? "Stop" : "Send";
  $("send").disabled = !ready && !current.open;
  const { scrollTop, scrollHeight, clientHeight } = $("thread");
  const follows = scrollHeight - scrollTop - clientHeight < 160;
  if (current.open && follows) requestAnimationFrame(() => ($("thread").scrollTop = $("thread").scrollHeight));
});

const drawList = paced(() => {
  const states = conversations.map((c) => [c.title, c.open, c === current, c.turns.length].join());
  if (states.join("\n") === $("list").dataset.drawn) return; // keeps the focus where it is
  $("list").dataset.drawn = states.join("\n");
  $("list").replaceChildren(...conversations.map(listed));
});

function listed(conversation) {
  const { title, open, turns } = conversation;
  const state = open ? "writing" : turns.length ? count(turns.length, "text") : "empty";
  const act = open ? () => conversation.stop() : () => remove(conversation);
  const chosen = conversation === current ? { "aria-current": "true" } : {};
  return el(
    "li",
    { class: open ? "open" : null, ...chosen },
    el("button", { type: "button", class: "title", onclick: () => show(conversation) }, title, el("small", {}, state)),
    el("button", { type: "button", class: "quiet", "aria-label": `${open ? "Stop" : "Remove"}: ${title}`, onclick: act }, open ? "■" : "×"),
  );
}

const drawMeasures = paced(() => {
  const run = current.last?.run;
  const m = run?.steps.length ? measures(run) : null;
  $("this").replaceChildren(...(m ? figures(m) : [el("p", { class: "none" }, "Nothing written yet.")]));
  $("positions").replaceChildren(acceptance(m?.positions ?? []));
  const here = speedup(conversations.flatMap((conversation) => conversation.runs));
  const rows = [["Predicted", server.info?.predicted_speedup ?? null, "predicted"]];
  rows.push(["Server", server.info?.measured_speedup ?? null, "measured"], ["This page", here, "measured"]);
  const note = "This page compares its own texts, once some were made with guesses and some plainly.";
  $("speedups").replaceChildren(factors(rows), el("p", { class: "note" }, here === null ? note : "Time a token, over all texts of this page."));
});

function figures(m) {
  const guessed = m.drafted ? `${shown(m.accepted)} of ${shown(m.drafted)} guesses kept` : "no guesses";
  const more = [
    ["Tokens", shown(m.tokens)],
    ["Speed", shown(m.perSecond, m.perSecond < 100 ? 1 : 0, " tokens/s")],
    ["Engine time", duration(m.seconds)],
    ["Overlap, α", m.alpha === null ? UNKNOWN : shown(m.alpha, 2)],
  ];
  if (m.mates) more.push(["Runs shared with", count(m.mates, "other text")]);
  return [
    el("p", { class: "hero" }, el("strong", {}, shown(m.perCall, 2)), " tokens per run of the target"),
    el("p", { class: "note" }, `${count(m.calls, "run")}, ${guessed}`),
    el("dl", {}, ...described(more)),
  ];
}

function described(facts) {
  return facts.map(([name, value]) => {
    const known = value !== null && value !== undefined;
    return el("div", {}, el("dt", {}, name), el("dd", { class: known ? null : "none" }, known ? `${value}` : UNKNOWN));
  });
}

// The server

function serverTold(problem) {
  ready = !problem;
  $("door").hidden = problem?.status !== 401;
  const message = problem && problem.status !== 401 ? `${ERRORS[problem.status] ?? problem.message} Trying again.` : "";
  if ($("banner").textContent !== message) $("banner").textContent = message;
  if (ready) describe(server.info);
  drawThread();
  drawMeasures();
}

function describe(info) {
  const pair = info.draft ? [info.target, el("span", {}, " guessed for by "), info.draft] : [info.target];
  $("pair").replaceChildren(...pair);
  $("server").replaceChildren(...described(server.facts()));
  settings.follow(info);
  $("prompt").placeholder = info.chat ? "Ask something" : "Begin a text, and the model goes on";
  if ($("examples").dataset.chat === `${info.chat}`) return;
  $("examples").dataset.chat = info.chat;
  const send = (text) => el("li", {}, el("button", { type: "button", onclick: () => ask(text) }, text));
  $("examples").replaceChildren(...EXAMPLES[Boolean(info.chat)].map(send));
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value);
  server.ask();
});

// The prompt

function ask(prompt) {
  if (!ready || current.open || !prompt.trim()) return;
  const { chat } = server.info;
  const asked = chat ? { messages: current.messages(settings.system, prompt) } : { prompt };
  const stream = { stream: true, stream_options: { include_usage: true } };
  const body = { model: server.model, ...asked, ...settings.fields(), ...stream };
  current.send(chat ? "v1/chat/completions" : "v1/completions", body, prompt, settings.compare);
  $("prompt").value = "";
  grow();
  $("thread").scrollTop = $("thread").scrollHeight;
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (current.open) current.stop();
  else ask($("prompt").value);
});
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask($("prompt").value);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (document.body.dataset.drawer) closeDrawer(true);
  else current.stop();
});
$("new").addEventListener("click", begin);

// How it looks

function closeDrawer(giveBack = false) {
  const name = document.body.dataset.drawer;
  if (!name) return;
  delete document.body.dataset.drawer;
  const button = document.querySelector(`[data-drawer=${name}]`);
  button.setAttribute("aria-expanded", "false");
  if (giveBack) button.focus();
}

for (const button of document.querySelectorAll("button[data-drawer]")) {
  button.addEventListener("click", () => {
    const name = button.dataset.drawer;
    const opens = document.body.dataset.drawer !== name;
    closeDrawer();
    if (!opens) return;
    document.body.dataset.drawer = name;
    button.setAttribute("aria-expanded", "true");
    $(name).querySelector("button")?.focus();
  });
}
document.querySelector("main").addEventListener("click", () => closeDrawer());

$("views").addEventListener("change", (event) => (document.body.dataset.view = event.target.value));
document.body.dataset.view = document.querySelector("[name=view]:checked").value;

const isDark = () =>
  (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
$("theme").setAttribute("aria-pressed", isDark());
$("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("foretoken-theme", theme);
  $("theme").setAttribute("aria-pressed", isDark());
});

begin();
server.ask();
