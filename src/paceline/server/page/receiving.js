// One answer: received into its message, drawn as it grows, and measured against plain decoding.

import { write } from "./client.js";
import { announce, at, trouble } from "./dom.js";
import { bars, compared, figures, summary } from "./figures.js";
import { missing } from "./models.js";
import { askKey } from "./panels.js";
import { key } from "./settings.js";

// Draws a view once a frame, and less often where drawing takes long.
function painter(view) {
  let frame = 0;
  let free = 0;
  const paint = () => {
    const start = performance.now();
    frame = 0;
    if (start < free) return next();
    view.draw(false);
    free = performance.now() + 3 * (performance.now() - start);
  };
  const next = () => {
    frame ||= requestAnimationFrame(paint);
  };
  return { next, end: () => cancelAnimationFrame(frame) };
}

// The text, thoughts and tokens that a message has. A character that was cut comes again, whole.
function begun(message) {
  const content = message.content.replace(/\ufffd+$/, "");
  const tokens = (message.tokens ?? []).map((token) => [...token]);
  const sum = tokens.reduce((length, [more]) => length + more, 0);
  if (tokens.length) tokens.at(-1)[0] -= sum - content.length;
  else if (content) tokens.push([content.length, null]);
  return { content, thought: (message.reasoning_content ?? "").replace(/\ufffd+$/, ""), tokens };
}

// Receives an answer into a message, after the text that it has. Returns it, null if nothing came.
export async function receive(body, message, view, signal, onChunk) {
  const { content: before, thought, tokens } = begun(message);
  if (before !== message.content) view.restart();
  const arrived = [];
  const painted = painter(view);
  let answer = null;
  if (!body.tools) message.tokens = tokens; // else some are of calls
  message.content = before;
  at("bars").hidden = true;
  view.note();
  try {
    await write(body, key(), signal, (current, more) => {
      if (!answer) view.note();
      answer = current;
      tokens.push(...more.map(({ text, source }) => [text.length, source]));
      arrived.push(...more);
      message.content = before + answer.text;
      if (answer.thought) message.reasoning_content = thought + answer.thought;
      if (answer.calls.length) message.tool_calls = answer.calls;
      painted.next();
      figures(answer);
      onChunk();
    }, (read, all) => view.note(`Reading the prompt: ${read} of ${all} tokens …`));
    const plain = comparing() ? await again(body, answer, view, signal) : null;
    message.note = summary(answer, plain);
  } catch (error) {
    if (error.status === 401) askKey();
    if (error.status === 404) trouble(await missing(error, body.model, key()));
    else if (error.name !== "AbortError") trouble(error);
    if (answer) {
      message.note = answer.timings ? summary(answer) : `Stopped after ${answer.tokens} tokens`;
    }
  }
  painted.end();
  if (answer) {
    const { ids, prompt, reason } = answer;
    delete message.next;
    if (reason === "length") {
      message.note += ` · cut ${message.content ? "" : "in its thoughts, "}at the limit of tokens`;
    }
    if ((reason === null || reason === "length") && ids.length && !answer.calls.length) {
      // It can go on from its tokens; text that waited for the next token comes again.
      message.next = {
        model: body.model,
        prompt: [...(body.prompt ?? prompt), ...ids],
        continued_tokens: (body.continued_tokens ?? 0) + ids.length,
        seed: body.seed,
      };
      message.content = before + arrived.map(({ text }) => text).join("");
    }
    view.draw(true);
    announce(message.note);
  }
  view.note(message.note);
  return answer;
}

const comparing = () => at("plain").checked && at("drafter").value !== "none";

// Generates the same answer with plain decoding, to time it; it is not shown.
async function again(body, answered, view, signal) {
  view.note("Generating it again with plain decoding …");
  announce("Generating it again with plain decoding …");
  const same = { ...body, speculation: { drafter: "none", pieces: true } };
  const plain = await write(same, key(), signal, (current) => bars(answered, current));
  compared(answered, plain);
  return plain;
}
