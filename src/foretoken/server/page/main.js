// The main module: connects conversations, the prompt, the server's state and the drawing.

import { Attachments } from "./attachments.js";
import { Conversation, List } from "./conversation.js";
import { closeDrawer, el, followDrawers, followViews, paced } from "./dom.js";
import { described, drawPanel } from "./panel.js";
import { Server, key, named } from "./server.js";
import { Settings } from "./settings.js";

const EXAMPLES = {
  // The first ones' answers repeat the prompt, so most draft tokens are accepted
  chat: [
    "Rewrite this in the past tense: The captain looks at the sea. The sea is calm, and the ship moves slowly. The captain walks to the rail, and the crew follows the captain.",
    "Work out 17 + 25 + 38 + 46 step by step.",
    "Why is the sky blue?",
  ],
  text: [
    "The captain looked",
    "It was a cold morning in November, and",
    '"My dear," said the old gentleman,',
  ],
  speech: [],
};
const NEAR = 80; // pixels from the end within which the page follows the output

const $ = (id) => document.getElementById(id);
const settings = new Settings($("settings"));
const attachments = new Attachments($("composer"), () => drawThread());
const server = new Server(serverTold);
const list = new List($("list"), { show, remove });
const conversations = [];
let current = null;
let ready = false;
let following = true; // whether to scroll to the end of the output as it arrives

// Conversations

function begin() {
  let conversation = conversations.find(({ turns }) => !turns.length);
  if (!conversation) {
    conversation = new Conversation(changed, ended);
    conversations.unshift(conversation);
  }
  show(conversation);
  $("prompt").focus();
}

function show(conversation) {
  current = conversation;
  $("turns").replaceChildren(conversation.element);
  $("thread").scrollTop = $("thread").scrollHeight;
  closeDrawer();
  drawTurns(); // again, as their width is known only now
  changed(conversation);
}

function drawTurns() {
  for (const turn of current?.turns ?? []) turn.draw();
}

function remove(conversation) {
  conversations.splice(conversations.indexOf(conversation), 1);
  if (conversation === current) conversations.length ? show(conversations[0]) : begin();
  drawList();
}

function changed(conversation) {
  drawList();
  drawPanelSoon();
  if (conversation !== current) return;
  drawThread();
  followText();
}

/** Announce a finished output to screen readers once, not token by token. A failure is an alert. */
function ended(run) {
  const outcome = {
    done: run.plain ? "Plain decoding is done." : run.said,
    stopped: "Stopped.",
    failed: "",
  };
  $("announcer").replaceChildren(el("p", {}, outcome[run.state]));
  server.ask();
}

// Drawing

const drawList = paced(() => list.draw(conversations, current), 0.05);

const drawPanelSoon = paced(() => {
  const pairs = conversations.flatMap((conversation) => conversation.pairs);
  drawPanel($, current.last?.run, pairs, server.info);
}, 0.25);

const drawThread = paced(() => {
  $("empty").hidden = current.turns.length > 0;
  $("send").textContent = current.open ? "Stop" : "Send";
  $("send").disabled = (!ready || attachments.busy) && !current.open;
}, 0);

/** Scroll to the end of the output, unless the user has scrolled away from it. */
const followText = paced(() => {
  if (following) $("thread").scrollTop = $("thread").scrollHeight;
}, 0.1);

$("thread").addEventListener("scroll", ({ target }) => {
  following = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR;
});

// The server

function serverTold(problem) {
  ready = !problem;
  const locked = problem?.status === 401;
  if (locked && $("door").hidden) requestAnimationFrame(() => $("key").focus());
  $("door").hidden = !locked;
  $("refused").textContent = locked && key.get() ? problem.message : "";
  const message = problem && !locked ? `${sentence(problem.message)} Trying again.` : "";
  if ($("banner").textContent !== message) $("banner").textContent = message;
  if (ready) describe(server.info);
  else $("prompt").placeholder = "Not ready yet";
  drawThread();
  drawPanelSoon();
}

function describe(info) {
  const draft = info.draft ? [el("span", {}, " with draft tokens from "), named(info.draft)] : [];
  $("pair").replaceChildren(named(info.target), ...draft);
  $("server").replaceChildren(...described(server.facts()));
  settings.follow(info);
  attachments.follow(info);
  document.body.classList.toggle("speech", info.transcribes);
  settings.offer(server.models, (name) => server.choose(name));
  $("prompt").placeholder = info.chat ? "Ask something" : "Enter a prompt";
  if ($("examples").hasChildNodes()) return;
  const example = (text) =>
    el("li", {}, el("button", { type: "button", onclick: () => ask(text) }, text));
  $("examples").append(...EXAMPLES[settings.makes].map(example));
}

function sentence(message) {
  return `${message[0].toUpperCase()}${message.slice(1).replace(/\.$/, "")}.`;
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value);
  server.ask();
});

// The prompt

function ask(prompt) {
  const answers = current.last?.run.calls.length > 0; // results of calls need no prompt
  const given = prompt.trim() || attachments.size || answers;
  if (!ready || current.open || attachments.busy || !given || !settings.valid()) return;
  const media = attachments.take();
  if (settings.makes === "speech") {
    current.send("v1/audio/transcriptions", form(media[0]), { media });
  } else {
    const chat = settings.makes === "chat";
    const asked = chat ? { messages: current.messages(settings.system, prompt, media) } : { prompt };
    const stream = { stream: true, stream_options: { include_usage: true } };
    const body = { model: server.model, ...asked, ...settings.fields(), ...stream };
    const path = chat ? "v1/chat/completions" : "v1/completions";
    current.send(path, body, { asked: prompt, media }, settings.compare);
  }
  $("prompt").value = "";
  grow();
  $("thread").scrollTop = $("thread").scrollHeight;
}

/** Return the form of a transcription request. */
function form({ file, name }) {
  const fields = new FormData();
  fields.append("file", file, name);
  fields.append("model", server.model);
  fields.append("stream", true);
  if (settings.language) fields.append("language", settings.language);
  return fields;
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
/** Handle Enter in the prompt and in the fields for results of calls. */
function entered(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  if (!event.target.matches("textarea")) return;
  event.preventDefault();
  ask($("prompt").value);
}
$("prompt").addEventListener("keydown", entered);
$("turns").addEventListener("keydown", entered);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !closeDrawer(true) && !attachments.stop()) current.stop();
});
$("new").addEventListener("click", begin);

followViews($("views"), drawTurns);
followDrawers();
begin();
server.ask();
