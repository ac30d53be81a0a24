// The list of chats in the browser: search, export, delete.

import { announce, at, button, download, element, trouble } from "./dom.js";
import { composed } from "./files.js";
import * as storage from "./storage.js";

let current = null; // the id of the chat on the screen
let drawn = ""; // what the list shows
let handlers = null;
const deleted = new Set(); // ids

const when = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });

const reason = (error) =>
  error?.name === "QuotaExceededError" ? "the browser's storage is full" : (error?.message ?? "unknown");

// Saves a chat; without storage it stays on the screen, and a line says so.
export async function save(chat) {
  if (deleted.has(chat.id)) return; // an answer to it may still have been in progress
  try {
    await storage.save(chat);
    if (handlers.chat() === chat) current = chat.id;
    await show();
  } catch (error) {
    trouble({
      message:
        `This chat cannot be stored (${reason(error)}): it is kept until the page is closed. ` +
        "Export it, or delete older ones.",
    });
  }
}

export async function show() {
  const text = at("search").value.trim();
  let heads = await storage.heads().catch(() => []);
  if (text) {
    const ids = await storage.search(text).catch(() => new Set());
    heads = heads.filter(({ id }) => ids.has(id));
  }
  if (text !== at("search").value.trim()) return; // a later search is under way
  const lines = JSON.stringify([current, text, ...heads.map(({ id, title }) => [id, title])]);
  if (lines === drawn) return; // so that a focus in the list stays
  drawn = lines;
  at("none").hidden = heads.length > 0;
  at("none").textContent = text ? "No chat has this text." : "No chats yet.";
  at("chats").replaceChildren(...heads.map(item));
}

function item(head) {
  const line = element("li");
  const open = button(head.title, () => handlers.open(head.id));
  open.title = when.format(head.changed);
  if (head.id === current) open.setAttribute("aria-current", "true");
  line.append(open, button("×", () => remove(head), `Delete ${head.title}`));
  return line;
}

export function mark(id) {
  current = id;
  show();
}

async function remove({ id, title }) {
  if (!confirm(`Delete the chat “${title}”?`)) return;
  await act(async () => {
    deleted.add(id);
    await storage.remove(id);
    handlers.removed(id);
    announce("The chat is deleted.");
  });
  at("search").focus();
}

async function removeAll() {
  const heads = await storage.heads().catch(() => []);
  if (!confirm(`Delete all ${heads.length} chats in this browser?`)) return;
  await act(async () => {
    for (const { id } of heads) deleted.add(id);
    await storage.removeAll();
    handlers.removed(current);
    announce("All chats are deleted.");
  });
}

async function act(work) {
  try {
    await work();
    await show();
  } catch (error) {
    trouble({ message: `The browser's storage failed (${reason(error)}).` });
  }
}

// A chat as Markdown, thoughts left out.
export function markdown({ title, system, messages }) {
  const parts = [`# ${title}`];
  if (system) parts.push("## System", system);
  for (const message of messages) {
    const names = { user: "You", tool: `Result of ${message.name}` };
    parts.push(`## ${names[message.role] ?? message.model ?? "Model"}`, composed(message));
    for (const { function: { name, arguments: values } } of message.tool_calls ?? []) {
      parts.push(`    ${name}(${values})`);
    }
  }
  return `${parts.filter(Boolean).join("\n\n")}\n`;
}

const exported = ({ title, changed, system, messages }) => ({
  title,
  changed: new Date(changed).toISOString(),
  system,
  messages: messages.map(({ ids: _, ...message }) => message),
});

const fileName = (title, ending) =>
  `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat"}.${ending}`;

// `open` gets the id of a chat, `removed` that of a deleted one, `chat` gives the one on the screen.
export function start({ chat, ...more }) {
  handlers = { chat, ...more };
  let timer = 0;
  at("search").addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(show, 150);
  });
  at("export-markdown").addEventListener("click", () => {
    download(fileName(chat().title, "md"), markdown(chat()), "text/markdown");
  });
  at("export-json").addEventListener("click", () => {
    const text = JSON.stringify(exported(chat()), null, 2);
    download(fileName(chat().title, "json"), text, "application/json");
  });
  at("export-all").addEventListener("click", () =>
    act(async () => {
      const text = JSON.stringify((await storage.chats()).map(exported), null, 2);
      download("chats.json", text, "application/json");
    }),
  );
  at("delete-all").addEventListener("click", removeAll);
  addEventListener("focus", show); // another window may have changed the list
  return show();
}
