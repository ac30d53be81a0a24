// The list of chats in the browser: search, rename, delete, and files of them.

import { announce, at, button, download, element, trouble } from "./dom.js";
import { exported, fileName, imported, markdown } from "./exchange.js";
import { uncover } from "./panels.js";
import * as storage from "./storage.js";

let current = null; // the id of the chat on the screen
let drawn = ""; // what the list shows
let renaming = false; // the list stays as it is meanwhile
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
    await (handlers.chat() === chat ? mark(chat.id) : show());
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
  if (renaming || text !== at("search").value.trim()) return; // a later search is under way
  const lines = JSON.stringify([text, ...heads.map(({ id, title }) => [id, title])]);
  if (lines !== drawn) {
    drawn = lines;
    at("none").hidden = heads.length > 0;
    at("none").textContent = text ? "No chat has this text." : "No chats yet.";
    at("chats").replaceChildren(...heads.map(item));
  }
  // The other lines stay as they are, and with them a focus in the list.
  heads.forEach(({ id }, place) => {
    const open = at("chats").children[place].firstElementChild;
    if (id === current) open.setAttribute("aria-current", "true");
    else open.removeAttribute("aria-current");
  });
}

function item(head) {
  const line = element("li");
  line.dataset.id = head.id;
  const open = button(head.title, () => handlers.open(head.id));
  open.title = when.format(head.changed);
  const begin = () => rename(head, line);
  open.addEventListener("dblclick", begin);
  open.addEventListener("keydown", (event) => event.key === "F2" && begin());
  line.append(
    open,
    button("✎", begin, `Rename ${head.title}`),
    button("×", () => remove(head), `Delete ${head.title}`),
  );
  return line;
}

export const isRenaming = () => renaming;

// A field in place of a chat's line. Escape leaves the title as it was.
function rename({ id, title }, line) {
  const parts = [...line.children];
  const field = element("input");
  field.value = title;
  field.setAttribute("aria-label", `New title of ${title}`);
  const end = async (isKept) => {
    if (!renaming) return; // a field that is removed loses its focus, too
    renaming = false;
    const changed = field.value.trim();
    const focused = document.activeElement === field;
    line.replaceChildren(...parts);
    if (focused) parts[1].focus();
    if (isKept && changed && changed !== title) {
      await act(async () => {
        await storage.rename(id, changed);
        handlers.renamed(id, changed);
      });
      if (focused) at("chats").querySelector(`[data-id="${id}"] button:nth-child(2)`)?.focus();
    } else await show();
  };
  field.addEventListener("keydown", (event) => {
    if ((event.key !== "Escape" && event.key !== "Enter") || event.isComposing) return;
    event.preventDefault(); // the key is not for the button that gets the focus
    event.stopPropagation();
    end(event.key === "Enter");
  });
  field.addEventListener("blur", () => end(true));
  renaming = true;
  line.replaceChildren(field);
  field.select();
}

// Marks the chat on the screen, whose address a reload keeps; null: it is new.
export function mark(id) {
  current = id;
  window.history.replaceState(null, "", id ? `#chat/${id}` : location.pathname + location.search);
  return show();
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
  const which = heads.length === 1 ? "the only chat" : `all ${heads.length} chats`;
  if (!heads.length || !confirm(`Delete ${which} in this browser?`)) return;
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

// Adds the chats of an exported file, without those that are here already, and opens its first.
async function importFile(file) {
  let chats = null;
  uncover(); // a line about what went wrong is beside the chat
  try {
    chats = imported(file.name, await file.text());
  } catch (error) {
    return trouble(error);
  }
  await act(async () => {
    const text = (chat) => JSON.stringify(exported(chat));
    const known = new Map((await storage.chats()).map((chat) => [text(chat), chat.id]));
    const added = chats.filter((chat) => !known.has(text(chat)));
    const ids = await storage.add(added);
    trouble(null);
    announce(`Chats imported: ${added.length} of ${chats.length}.`);
    handlers.open(known.get(text(chats[0])) ?? ids[0]);
  });
}

// `open` gets the id of a chat, `removed` that of a deleted one, `renamed` an id and the new title;
// `chat` gives the one on the screen.
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
  at("import").addEventListener("click", () => at("import-picker").click());
  at("import-picker").addEventListener("change", async () => {
    const [file] = at("import-picker").files;
    if (file) await importFile(file);
    at("import-picker").value = "";
  });
  addEventListener("focus", show); // another window may have changed the list
  return show();
}
