// The panel's fields: what a request takes from them, and their values in the browser.
//
// Invariants: an empty field is not sent, so that the model's defaults apply; the key is not stored.

import { at } from "./dom.js";
import { defaults, model } from "./models.js";
import { keep, value } from "./storage.js";

const LONGEST = 2048; // tokens of an answer of a model whose default is not known

const NUMBERS = {
  temperature: "temperature",
  "top-p": "top_p",
  "top-k": "top_k",
  "min-p": "min_p",
  repetition: "repetition_penalty",
};

// Shows what an empty field means.
export function showDefaults() {
  for (const [id, name] of [...Object.entries(NUMBERS), ["most", "max_tokens"]]) {
    const value = defaults()[name];
    at(id).placeholder = value == null ? "Model default" : `Default (${value})`;
  }
}

export const key = () => at("key").value.trim();

// Fields of a request that the panel decides. Throws if a field is not valid.
export function sampling() {
  const fields = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    const field = at(id);
    if (!field.checkValidity()) throw new Error(`${label(field)}: ${field.validationMessage}`);
    if (field.value) fields[name] = field.valueAsNumber;
  }
  const seed = at("seed").valueAsNumber;
  return {
    ...fields,
    ...(model() ? { model: model() } : {}),
    seed: Number.isNaN(seed) ? crypto.getRandomValues(new Uint32Array(1))[0] : seed,
    max_tokens: at("most").valueAsNumber || defaults().max_tokens || LONGEST,
    speculation: speculation(),
    return_token_ids: true, // to continue an answer that is cut
  };
}

// Fields of a chat's request beyond those.
export function chatFields() {
  const tools = functions();
  return {
    ...(tools.length ? { tools } : {}),
    ...(at("thinking").value ? { reasoning_effort: at("thinking").value } : {}),
  };
}

function speculation() {
  const fields = { pieces: true };
  if (at("drafter").value) fields.drafter = at("drafter").value;
  if (at("policy").value) fields.policy = at("policy").value;
  if (at("block").value) fields.max_block = at("block").valueAsNumber;
  return fields;
}

// What the model may call. Throws if the field is no JSON.
function functions() {
  const text = at("tools").value.trim();
  if (!text) return [];
  try {
    return [JSON.parse(text)]
      .flat()
      .map((tool) => (tool.function ? tool : { type: "function", function: tool }));
  } catch (error) {
    throw new Error(`Functions: ${error.message}`);
  }
}

const label = (field) => field.labels[0].textContent;

const stored = () =>
  [...at("panel").querySelectorAll("input, select, textarea")].filter(({ id }) => id !== "key");

// Fills in the values of the last visit, and stores them when they change.
export async function remember() {
  at("panel").addEventListener("change", () => {
    const values = stored().map(({ id, type, checked, value: text }) => [
      id,
      type === "checkbox" ? checked : text,
    ]);
    keep("settings", Object.fromEntries(values)).catch(() => {}); // they hold until the page closes
  });
  const values = (await value("settings").catch(() => null)) ?? {};
  for (const field of stored()) {
    if (!(field.id in values)) continue;
    if (field.type === "checkbox") field.checked = values[field.id];
    else field.value = values[field.id];
  }
}
