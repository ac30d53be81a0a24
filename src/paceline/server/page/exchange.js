// Chats as files: exported as Markdown or JSON, and imported from that JSON.
//
// Invariant: of a file that is damaged or of another kind nothing is taken.

import { composed } from "./files.js";

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

export function exported({ title, changed, system, messages }) {
  return { title, changed: new Date(changed ?? Date.now()).toISOString(), system, messages: messages.map(picked) };
}

export const fileName = (title, ending) =>
  `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat"}.${ending}`;

const isText = (value) => typeof value === "string";
const orNone = (holds) => (value) => value === undefined || holds(value);
const listOf = (holds) => (value) => Array.isArray(value) && value.every(holds);
const objectOf = (fields) => (value) =>
  value instanceof Object && Object.entries(fields).every(([name, holds]) => holds(value[name]));

// The fields of a message that are exported, and what holds of each.
const FIELDS = {
  role: (role) => ["user", "assistant", "tool"].includes(role),
  content: isText,
  files: orNone(listOf(objectOf({ name: isText, text: isText }))),
  model: orNone(isText),
  note: orNone(isText),
  reasoning_content: orNone(isText),
  tool_calls: orNone(listOf(objectOf({ id: isText, function: objectOf({ name: isText, arguments: isText }) }))),
  tool_call_id: orNone(isText),
  name: orNone(isText),
};

const isMessage = objectOf(FIELDS);
const isChat = objectOf({
  title: isText,
  changed: (time) => isText(time) && !Number.isNaN(Date.parse(time)),
  system: orNone(isText),
  messages: (messages) => listOf(isMessage)(messages) && messages.length > 0,
});

const picked = (message) =>
  Object.fromEntries(Object.entries(message).filter(([name]) => Object.hasOwn(FIELDS, name)));

// The chats of an exported file, without ids. Throws if it is none.
export function imported(name, text) {
  let chats = null;
  try {
    chats = [JSON.parse(text)].flat();
  } catch {
    throw new Error(`${name} is not imported: it is no JSON, or damaged.`);
  }
  if (!chats.length || !chats.every(isChat)) {
    throw new Error(`${name} is not imported: expected chats as this page exports them in JSON.`);
  }
  return chats.map(({ title, changed, system = "", messages }) => ({
    title,
    named: true,
    changed: Date.parse(changed),
    system,
    messages: messages.map(picked),
  }));
}
