// Text files that go with a message: chosen, dropped or pasted.

import { announce, at, button, element, trouble } from "./dom.js";

const LARGEST = 2 ** 20; // bytes; the server takes bodies of 8 MiB

let attached = []; // { name, text }

export const files = () => attached;

export function attach(list) {
  attached = list;
  at("files").replaceChildren(
    ...attached.map((file) => {
      const item = element("li", file.name);
      const remove = button("×", () => {
        attach(attached.filter((other) => other !== file));
        at("message").focus();
      }, `Remove ${file.name}`);
      item.append(remove);
      return item;
    }),
  );
}

async function read(file) {
  if (file.size > LARGEST) {
    throw new Error(`${file.name} has ${file.size} bytes: expected at most ${LARGEST}.`);
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError();
    return { name: file.name, text };
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new Error(`${file.name} is not text: expected a file in UTF-8.`);
  }
}

async function add(list) {
  trouble(null);
  for (const file of list) {
    try {
      attach([...attached, await read(file)]);
      announce(`${file.name} is attached.`);
    } catch (error) {
      trouble(error);
    }
  }
  at("message").focus();
}

// A message's text with its files, as the model gets it.
export function composed({ content, files: list = [] }) {
  const parts = list.map(({ name, text }) => {
    // A fence that is longer than any in the file.
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, content].filter(Boolean).join("\n\n");
}

const holdsFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files");

export function accept() {
  at("attach").addEventListener("click", () => at("picker").click());
  at("picker").addEventListener("change", () => {
    add([...at("picker").files]);
    at("picker").value = "";
  });
  document.addEventListener("dragover", (event) => {
    if (!holdsFiles(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dropping");
  });
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    if (!holdsFiles(event)) return;
    event.preventDefault();
    add([...event.dataTransfer.files]);
  });
  at("message").addEventListener("paste", (event) => {
    const list = [...event.clipboardData.files];
    if (!list.length) return;
    event.preventDefault();
    add(list);
  });
}
