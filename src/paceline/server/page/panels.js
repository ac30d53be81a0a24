// The panels beside the chat: chats on the left, settings on the right. On a narrow screen an open
// panel covers the chat.

import { at } from "./dom.js";
import { keep, value } from "./storage.js";

const NAMES = { history: "show-history", panel: "show-panel" }; // panel -> its button
const narrow = matchMedia("(max-width: 60rem)");

const covering = () => narrow.matches && Object.keys(NAMES).find((name) => !at(name).hidden);

function set(name, isOpen) {
  at(name).hidden = !isOpen;
  at(NAMES[name]).setAttribute("aria-expanded", isOpen);
  cover();
}

// What is covered takes no focus.
function cover() {
  const open = covering();
  at("chat").inert = Boolean(open);
  for (const name of Object.keys(NAMES)) at(name).classList.toggle("over", open === name);
}

export function open(name) {
  if (narrow.matches) for (const other of Object.keys(NAMES)) set(other, other === name);
  else set(name, true);
}

// Closes the panel that covers the chat. Returns its button, if there was one.
export function uncover() {
  const name = covering();
  if (!name) return null;
  set(name, false);
  return at(NAMES[name]);
}

// Shows the field for the key that the server requires.
export function askKey() {
  open("panel");
  at("key").focus();
}

export async function start() {
  for (const [name, id] of Object.entries(NAMES)) {
    at(id).addEventListener("click", () => {
      const opening = at(name).hidden;
      if (opening) open(name);
      else set(name, false);
      if (opening && narrow.matches) at(name).querySelector("input, textarea, button").focus();
      if (narrow.matches) return;
      const shown = Object.keys(NAMES).filter((other) => !at(other).hidden);
      keep("panels", shown).catch(() => {}); // they stay as they are until the page closes
    });
  }
  narrow.addEventListener("change", () => {
    if (narrow.matches) for (const name of Object.keys(NAMES)) set(name, false);
    else cover();
  });
  const shown = (await value("panels").catch(() => null)) ?? ["history"];
  if (!narrow.matches) for (const name of shown) set(name, true);
}
