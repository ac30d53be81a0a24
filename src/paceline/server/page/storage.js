// Chats and settings in the browser (IndexedDB). Nothing of them is sent anywhere.
//
// A chat is { id, title, named, changed, system, messages }; its head is the same without messages.
// `named`: the user gave it its title.
// Invariant: of two windows with one chat, the second to save gets a copy: neither loses a message.

const HEADS = "heads";
const CHATS = "chats";
const VALUES = "values";

export const newId = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("paceline", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(HEADS, { keyPath: "id" });
      request.result.createObjectStore(CHATS, { keyPath: "id" });
      request.result.createObjectStore(VALUES);
    };
    request.onsuccess = () => {
      // A later version of the page may wait for this one to let go.
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
  });
  return opening;
}

const result = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

// Runs `work` with the stores in one transaction; its result once all is on disk.
async function transaction(names, mode, work) {
  const opened = (await database()).transaction(names, mode);
  const end = new Promise((resolve, reject) => {
    opened.oncomplete = resolve;
    opened.onabort = () => reject(opened.error ?? new Error("the browser gave up"));
  });
  const value = await Promise.all([work(...names.map((name) => opened.objectStore(name))), end]);
  return value[0];
}

// Heads of all chats, the last changed first.
export async function heads() {
  const all = await transaction([HEADS], "readonly", (store) => result(store.getAll()));
  return all.sort((one, other) => other.changed - one.changed);
}

export function load(id) {
  return transaction([CHATS], "readonly", (store) => result(store.get(id)));
}

export function chats() {
  return transaction([CHATS], "readonly", (store) => result(store.getAll()));
}

// Saves a chat as it is now, and gives it a new id if another window has saved it meanwhile.
export function save(chat) {
  chat.changed = Date.now();
  const version = newId();
  return transaction([HEADS, CHATS], "readwrite", async (headStore, chatStore) => {
    const stored = await result(headStore.get(chat.id));
    if (stored && stored.version !== chat.version) chat.id = version;
    else if (stored?.named) Object.assign(chat, { title: stored.title, named: true });
    chat.version = version;
    const { messages, ...head } = chat;
    headStore.put(head);
    chatStore.put({ ...head, messages });
  });
}

// Adds chats under new ids, which it returns: all of them or, if it throws, none.
export function add(chats) {
  const entries = chats.map((chat) => ({ ...chat, id: newId(), version: newId() }));
  return transaction([HEADS, CHATS], "readwrite", async (headStore, chatStore) => {
    for (const { messages, ...head } of entries) {
      headStore.put(head);
      chatStore.put({ ...head, messages });
    }
    return entries.map(({ id }) => id);
  });
}

// Gives a chat another title. Its place in the list stays.
export function rename(id, title) {
  return transaction([HEADS, CHATS], "readwrite", (...stores) =>
    Promise.all(
      stores.map(async (store) => {
        const entry = await result(store.get(id));
        if (entry) await result(store.put({ ...entry, title, named: true }));
      }),
    ),
  );
}

export function remove(id) {
  return transaction([HEADS, CHATS], "readwrite", (...stores) =>
    Promise.all(stores.map((store) => result(store.delete(id)))),
  );
}

export function removeAll() {
  return transaction([HEADS, CHATS], "readwrite", (...stores) =>
    Promise.all(stores.map((store) => result(store.clear()))),
  );
}

// Ids of the chats that contain a text, in whatever case.
export function search(text) {
  const words = text.toLowerCase();
  const ids = new Set();
  return transaction(
    [CHATS],
    "readonly",
    (store) =>
      new Promise((resolve, reject) => {
        const request = store.openCursor();
        request.onerror = () => reject(request.error);
        request.onsuccess = () => {
          const cursor = request.result;
          if (!cursor) return resolve(ids);
          const { id, title, messages } = cursor.value;
          const texts = [title, ...messages.map(({ content }) => content)];
          if (texts.some((part) => part.toLowerCase().includes(words))) ids.add(id);
          cursor.continue();
        };
      }),
  );
}

export function value(name) {
  return transaction([VALUES], "readonly", (store) => result(store.get(name)));
}

export function keep(name, content) {
  return transaction([VALUES], "readwrite", (store) => result(store.put(content, name)));
}
