// One answer: received into its message, drawn as it grows, and measured against plain decoding.

import { write } from "./client.js";
import { announce, at, trouble } from "./dom.js";
import { bars, compared, figures, summary } from "./figures.js";
import { key } from "./settings.js";
import { pieces } from "./turns.js";

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

// Receives an answer into a message, after the text that it has. Returns it, null if nothing came.
export async function receive(body, message, view, signal, onChunk) {
  const { content: before } = message;
  const known = pieces.get(message) ?? (before ? [{ text: before, source: null }] : []);
  const tokens = [...known];
  const arrived = [];
  const painted = painter(view);
  let answer = null;
  if (!body.tools) pieces.set(message, tokens);
  at("bars").hidden = true;
  view.note();
  try {
    await write(body, key(), signal, (current, more) => {
      answer = current;
      tokens.push(...more);
      arrived.push(...more);
      message.content = before + answer.text;
      if (answer.thought) message.reasoning_content = answer.thought;
      if (answer.calls.length) message.tool_calls = answer.calls;
      painted.next();
      figures(answer);
      onChunk();
    });
    const plain = comparing() ? await again(body, answer, view, signal) : null;
    message.note = summary(answer, plain);
  } catch (error) {
    if (error.name !== "AbortError") trouble(error);
    if (answer) {
      message.note = answer.timings ? summary(answer) : `Stopped after ${answer.tokens} tokens`;
    }
  }
  painted.end();
  if (answer) {
    delete message.ids;
    const cut = answer.reason === null || answer.reason === "length";
    if (answer.reason === "length") message.note += " · cut at the longest answer";
    if (cut && answer.text && !answer.calls.length) {
      // It can go on from its tokens; text that waited for the next token comes again.
      message.ids = [...(body.prompt ?? answer.prompt), ...answer.ids];
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
