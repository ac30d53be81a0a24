// The models of the server: their names in the head of the page, and which one is asked.

import { ask } from "./client.js";
import { at, element } from "./dom.js";

let entries = []; // of the server's list

// Settings of a request that leaves them out, as far as the server says.
export const defaults = () => entries.find(({ id }) => id === model())?.defaults ?? {};

// The model that is asked; empty while it is not known.
export const model = () =>
  (at("models").hidden ? at("model").textContent : at("choice").value).trim();

// Shows the models that the server has now.
export async function refresh(key) {
  const before = model();
  const { data } = await (await ask("v1/models", key)).json();
  entries = data;
  const several = data.length > 1;
  const { id } =
    data.find((entry) => entry.id === before) ??
    data.find(({ status }) => status?.value === "loaded") ??
    data[0];
  at("choice").replaceChildren(...data.map((entry) => element("option", entry.id)));
  at("choice").value = id;
  at("models").hidden = !several;
  at("model").hidden = several;
  at("model").textContent = id;
  document.title = several ? "paceline" : `${id} · paceline`;
}

// The line about a model that the server does not have (any more): it was started with another.
export async function missing(error, name, key) {
  await refresh(key).catch(() => {}); // then the server's own line says enough
  if (!name || model() === name) return error;
  return { message: `The server no longer has ${name}: the next message goes to ${model()}.` };
}
