// The page: one chat on the screen, and what its buttons do.
//
// Invariants: text is inserted as text, or as Markdown that was sanitised; a request that fails
// loses no message; the key is not stored.

import { at, trouble } from "./dom.js";
import * as files from "./files.js";
import * as history from "./history.js";
import { model, refresh } from "./models.js";
import * as panels from "./panels.js";
import { receive } from "./receiving.js";
import { startScrolling, toEnd, whenNear } from "./scrolling.js";
import { chatFields, key, remember, sampling, showDefaults } from "./settings.js";
import { load, newId } from "./storage.js";
import { AnswerView, UserView, copying } from "./turns.js";

let chat = blank();
let views = []; // of the chat's messages, in their order
let stopper = null; // aborts the answer in progress
let opening = null; // the id of the chat that was asked for last

const STORE_MS = 3000; // between two times that a growing answer is stored

function blank() {
  return { id: newId(), title: "", system: "", messages: [] };
}

// -- messages ------------------------------------------------------------------------------------

function show(message) {
  const view =
    message.role === "assistant"
      ? new AnswerView(message, message.model ?? "Model", at("tints").checked)
      : new UserView(message);
  views.push(view);
  at("welcome").hidden = true;
  at("turns").append(view.article);
  return view;
}

function clear(place = 0) {
  for (const view of views.splice(place)) view.article.remove();
  at("welcome").hidden = place > 0;
}

// Replaces the messages of a chat from a place on.
function replace(changed, place, messages) {
  changed.messages.splice(place, Infinity, ...messages);
  if (changed !== chat) return; // another one is on the screen meanwhile
  clear(place);
  for (const message of messages) whenNear(show(message));
}

function showChat(opened) {
  stopper?.abort();
  clear();
  chat = opened;
  for (const message of chat.messages) whenNear(show(message));
  if (chat.messages.length) at("system").value = chat.system;
  offer();
  toEnd();
}

// Calls of the last answer that have no result yet.
function openCalls() {
  const place = chat.messages.findLastIndex(({ role }) => role === "assistant");
  const results = new Set(chat.messages.slice(place + 1).map((message) => message.tool_call_id));
  return (chat.messages[place]?.tool_calls ?? []).filter(({ id }) => !results.has(id));
}

// The message for a text: the result of a call that waits for one, else the user's.
function message(text, list) {
  const [call] = openCalls();
  const sent = { role: "user", content: text, ...(list.length ? { files: list } : {}) };
  if (!call) return sent;
  return { role: "tool", tool_call_id: call.id, name: call.function.name, content: files.composed(sent) };
}

// A message in the API's form.
function sent({ role, content, files: list, reasoning_content, tool_calls, tool_call_id, name }) {
  return { role, content: files.composed({ content, files: list }), reasoning_content, tool_calls, tool_call_id, name };
}

function request() {
  const system = at("system").value.trim();
  chat.system = system;
  return {
    ...sampling(),
    ...chatFields(),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...chat.messages.map(sent)],
    stream: true,
  };
}

// Names the field, and gives every message the buttons that it may have now.
function offer() {
  const [call] = openCalls();
  at("asked").textContent = call ? `Result of ${call.function.name}` : "Message";
  views.forEach((view, place) => {
    const { message } = view;
    const actions = [copying(message)];
    const last = place === views.length - 1;
    if (!stopper && message.role === "user") {
      actions.push(["Edit", () => edit(view, place)], ["Delete", () => remove(place)]);
    }
    if (!stopper && last && message.role === "assistant") {
      actions.push(["Regenerate", () => act(() => instead(place, []))]);
      if (message.next) actions.push(["Continue", () => act(() => resume(view))]);
    }
    view.act(actions);
  });
}

// Sends a question again with another text. The chat with its later answers stays in the list.
function edit(view, place) {
  const branches = views.length - place > 2;
  view.edit((text) => {
    const { files: list } = view.message;
    if (!text && !list) return;
    const edited = { role: "user", content: text, ...(list ? { files: list } : {}) };
    act(async () => {
      const asked = chat;
      const { id, version, title } = asked;
      if (branches) Object.assign(asked, { id: newId(), version: undefined });
      if (place === 0 && !asked.named) asked.title = "";
      if (!(await instead(place, [edited]))) Object.assign(asked, { id, version, title });
    });
  }, branches ? "The chat as it is now stays in the list." : "");
}

// Asks for an answer to other messages from a place on. False: there is none, and the old ones stay.
async function instead(place, messages) {
  const asked = chat;
  const removed = chat.messages.slice(place);
  replace(asked, place, messages);
  const received = await answer();
  if (!received) replace(asked, place, removed);
  return received;
}

// Deletes a question and everything up to the next one.
function remove(place) {
  const next = chat.messages.findIndex(({ role }, other) => other > place && role === "user");
  const count = (next < 0 ? chat.messages.length : next) - place;
  if (!confirm("Delete this message and its answer?")) return;
  chat.messages.splice(place, count);
  for (const view of views.splice(place, count)) view.article.remove();
  at("welcome").hidden = chat.messages.length > 0;
  offer();
  history.save(chat);
  at("message").focus();
}

// -- one answer ----------------------------------------------------------------------------------

// Asks for an answer to the chat. False: there is none, and what went wrong is on the screen.
async function answer() {
  const asked = chat;
  let body = null;
  try {
    body = request();
  } catch (error) {
    trouble(error);
    return false;
  }
  const message = { role: "assistant", content: "", model: model() || "Model" };
  const view = show(message);
  view.draw(false);
  offer();
  toEnd();
  const received = await receive(body, message, view, stopper.signal, () => kept(asked, message));
  if (received?.tokens || received?.timings) {
    add(asked, message);
    await history.save(asked);
    return true;
  }
  view.article.remove();
  views = views.filter((other) => other !== view);
  return false;
}

function add(asked, message) {
  if (asked.messages.at(-1) !== message) asked.messages.push(message);
  asked.title ||= titled(asked.messages[0]);
}

let stored = 0; // when a growing answer was stored

// Stores an answer while it grows, now and then: the page may be closed before its end.
function kept(asked, message) {
  if (!(message.content || message.reasoning_content) || performance.now() - stored < STORE_MS) return;
  stored = performance.now();
  add(asked, message);
  history.save(asked);
}

// Continues an answer that was cut, from its own tokens: as if it had not ended.
async function resume(view) {
  const asked = chat;
  const { message } = view;
  const body = { ...sampling(), ...message.next, stream: true };
  await receive(body, message, view, stopper.signal, () => kept(asked, message));
  await history.save(asked);
}

function titled({ content, files: list }) {
  const line = content.trim().split("\n")[0] || list?.[0].name || "Chat";
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

// Runs what asks for an answer; one at a time.
async function act(work) {
  if (stopper) return;
  const isLost = () => [at("send"), document.body].includes(document.activeElement);
  busy(true);
  trouble(null);
  offer();
  if (isLost()) at("stop").focus();
  try {
    await work();
  } finally {
    const returns = isLost() || document.activeElement === at("stop");
    busy(false);
    offer();
    if (returns) at("message").focus();
  }
}

function busy(yes) {
  stopper = yes ? new AbortController() : null;
  at("stop").hidden = !yes;
  at("send").hidden = yes;
  at("log").setAttribute("aria-busy", yes);
}

async function send() {
  opening = null;
  const text = at("message").value.trim();
  const list = files.files();
  if (stopper || !(text || list.length)) return;
  const asked = chat;
  const place = chat.messages.length;
  at("message").value = "";
  files.attach([]);
  await act(async () => {
    const question = message(text, list);
    chat.messages.push(question);
    show(question);
    toEnd();
    if (openCalls().length || (await answer())) return;
    // There is no answer: the question goes back into its field.
    replace(asked, place, []);
    if (asked !== chat) return;
    at("message").value ||= text;
    files.attach(list);
  });
}

// -- the page ------------------------------------------------------------------------------------

function newChat() {
  opening = null;
  showChat(blank());
  history.mark(null);
  panels.uncover();
  at("message").focus();
}

async function open(id) {
  opening = id;
  if (id === chat.id && stopper) return; // a second click stops no answer
  const opened = await load(id).catch(() => null);
  if (opening !== id) return;
  if (!opened) return trouble({ message: "The browser no longer has this chat." });
  trouble(null);
  showChat(opened);
  history.mark(id);
  panels.uncover();
  if (!history.isRenaming()) at("message").focus();
}

// Opens the chat that the page's address names, if it names one.
const openAddressed = () => {
  const [, id] = /^#chat\/(.+)$/.exec(location.hash) ?? [];
  return id && open(id);
};

async function greet() {
  try {
    await refresh(key());
    showDefaults();
    trouble(null);
  } catch (error) {
    trouble(error);
    if (error.status === 401) panels.askKey();
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const opener = panels.uncover();
  if (opener) opener.focus();
  else stopper?.abort();
});
at("stop").addEventListener("click", () => stopper?.abort());
at("new").addEventListener("click", newChat);
at("key").addEventListener("change", greet);
at("choice").addEventListener("change", showDefaults);
addEventListener("hashchange", () => openAddressed() ?? newChat());
at("tints").addEventListener("change", tint);

function tint() {
  at("legend").hidden = !at("tints").checked;
  for (const view of views) if (view instanceof AnswerView) view.tinted = at("tints").checked;
}

async function start() {
  startScrolling();
  files.accept();
  at("message").focus();
  await Promise.all([panels.start(), remember()]);
  tint();
  history.start({
    chat: () => chat,
    open,
    removed: (id) => id === chat.id && newChat(),
    renamed: (id, title) => id === chat.id && Object.assign(chat, { title, named: true }),
  });
  await Promise.all([greet(), openAddressed()]);
}

start();
