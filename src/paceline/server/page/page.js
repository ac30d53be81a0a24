// The page: a chat that shows which tokens were drafted.
//
// Invariants: every figure was measured since the page was opened; text is inserted as text only;
// nothing is stored, neither the chat nor the key.

import { ask, speed, write } from "./client.js";

const at = (id) => document.getElementById(id);
const key = () => at("key").value.trim();
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const two = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
const percent = new Intl.NumberFormat("en", { style: "percent" });

let chat = []; // messages, in the API's form
let open = []; // calls of the last answer that have no result yet
let stopper = null; // aborts the answer in progress
const session = { answers: 0, drafted: { tokens: 0, ms: 0 }, plain: { tokens: 0, ms: 0 } };

// -- output --------------------------------------------------------------------------------------

function made(name, text = "", kind = "") {
  const element = document.createElement(name);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function say(who, text = "") {
  const turn = made("article", "", who);
  const words = made("p", text, "words");
  turn.append(made("h3", who === "user" ? "You" : "Model"), words);
  at("welcome").hidden = true;
  at("log").append(turn);
  at("log").scrollTop = at("log").scrollHeight;
  return { turn, words };
}

// An element for the model's thoughts, folded, above its answer.
function folded(words) {
  const thought = made("p");
  const fold = made("details", "", "thought");
  fold.append(made("summary", "Thoughts"), thought);
  words.before(fold);
  return thought;
}

// Shows calls of functions after the text of an answer, as they are written.
function calls(words, all) {
  const shown = words.parentElement.querySelectorAll(".call");
  all.forEach(({ function: { name, arguments: given } }, index) => {
    const call = shown[index] ?? words.parentElement.appendChild(made("pre", "", "call"));
    call.textContent = `${name}(${given})`;
  });
}

// Appends the tokens of an answer. Text may arrive before its tokens; it is not tinted until then.
// With functions it is not tinted at all, because tokens of calls are no text.
function writer(words, tinted) {
  const rest = document.createTextNode("");
  words.append(rest);
  let shown = 0;
  let thought = null;
  return (answer, pieces) => {
    if (answer.thought) {
      thought ??= folded(words);
      thought.textContent = answer.thought;
    }
    const log = at("log");
    const below = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    calls(words, answer.calls);
    for (const { text, source } of tinted ? pieces : []) {
      const word = made("span", text, source ? "drafted" : "own");
      if (source) word.title = `drafted by ${source}`;
      rest.before(word);
      shown += text.length;
    }
    rest.data = answer.text.slice(shown);
    if (below) log.scrollTop = log.scrollHeight;
  };
}

function rate(tokensPerSecond) {
  return tokensPerSecond ? one.format(tokensPerSecond) : "–";
}

function figures(answer) {
  at("speed").textContent = rate(speed(answer));
  at("tokens").textContent = answer.tokens;
  at("first").textContent = answer.first ? `${two.format(answer.first / 1e3)} s` : "–";
  at("acceptance").textContent = answer.drafted
    ? `${answer.accepted} of ${answer.drafted} (${percent.format(answer.accepted / answer.drafted)})`
    : "no drafts";
  const later = answer.tokens - (answer.early ?? 0);
  at("per-step").textContent = answer.steps ? two.format(later / answer.steps) : "–";
  const { timings, about } = answer;
  at("cached").textContent = timings
    ? `${timings.cache_n} of ${timings.cache_n + timings.prompt_n} tokens`
    : "–";
  const by = Object.entries(about?.drafted_by ?? {});
  at("drafters").textContent =
    by.map(([who, all]) => `${who} ${about.accepted_by[who] ?? 0}/${all}`).join(", ") || "–";
}

function bars(drafted, plain) {
  const speeds = { speculative: speed(drafted), plain: plain ? speed(plain) : 0 };
  const most = Math.max(speeds.speculative, speeds.plain) || 1;
  at("bars").hidden = false;
  for (const [which, value] of Object.entries(speeds)) {
    at("bars").querySelector(`.${which}`).style.setProperty("--share", value / most);
    at(`bar-${which}`).textContent = rate(value);
  }
}

function faster(drafted, plain) {
  return `${two.format(drafted / plain)} times as fast`;
}

function note(turn, text) {
  turn.append(made("p", text, "note"));
  at("status").textContent = text;
}

function summary(answer, plain) {
  const parts = [`${answer.tokens} tokens`, `${rate(speed(answer))} tokens/s`];
  if (answer.drafted) parts.push(`${answer.accepted} of ${answer.drafted} draft tokens accepted`);
  if (plain) {
    parts.push(`plain ${rate(speed(plain))} tokens/s`);
    if (speed(plain)) parts.push(faster(speed(answer), speed(plain)));
    parts.push(plain.text === answer.text ? "the same text" : "a different text");
  }
  return parts.join(" · ");
}

function compared(answer, plain) {
  session.answers += 1;
  for (const [kind, { timings }] of Object.entries({ drafted: answer, plain })) {
    session[kind].tokens += (timings.predicted_per_second * timings.predicted_ms) / 1e3;
    session[kind].ms += timings.predicted_ms;
  }
  const [drafted, plainly] = [session.drafted, session.plain].map((all) => (1e3 * all.tokens) / all.ms);
  const answers = session.answers === 1 ? "One answer" : `${session.answers} answers`;
  at("session").textContent = Number.isFinite(drafted / plainly)
    ? `${answers} generated both ways: ${rate(drafted)} against ${rate(plainly)} tokens/s, ` +
      `${faster(drafted, plainly)}.`
    : "";
}

// What the model may call. Throws if the field is no JSON.
function functions() {
  const text = at("tools").value.trim();
  if (!text) return [];
  try {
    return [JSON.parse(text)].flat().map((each) =>
      each.function ? each : { type: "function", function: each },
    );
  } catch (error) {
    throw new Error(`Functions: ${error.message}`);
  }
}

// The message for a text: the result of a call that waits for one, else the user's.
function message(text) {
  if (!open.length) return { role: "user", content: text };
  const call = open.shift();
  return { role: "tool", tool_call_id: call.id, name: call.function.name, content: text };
}

function prompted() {
  at("asked").textContent = open.length ? `Result of ${open[0].function.name}` : "Message";
}

// The request for the next answer. Empty fields are not sent, so that the model's defaults apply.
function request() {
  const speculation = { pieces: true };
  if (at("drafter").value) speculation.drafter = at("drafter").value;
  if (at("policy").value) speculation.policy = at("policy").value;
  if (at("block").value) speculation.max_block = at("block").valueAsNumber;
  const temperature = at("temperature").valueAsNumber;
  const tools = functions();
  return {
    ...(tools.length ? { tools } : {}),
    ...(at("models").hidden ? {} : { model: at("choice").value }),
    messages: [...chat],
    stream: true,
    ...(Number.isNaN(temperature) ? {} : { temperature }),
    seed: crypto.getRandomValues(new Uint32Array(1))[0],
    max_tokens: at("most").valueAsNumber || 256,
    speculation,
  };
}

// -- one turn -------------------------------------------------------------------------------------

async function turn(text) {
  const mine = chat; // a new chat may replace it meanwhile
  const left = [...open];
  const asked = say("user", text);
  chat.push(message(text));
  prompted();
  if (open.length) return; // the next message is another call's result
  const { turn, words } = say("model");
  const compare = at("plain").checked && at("drafter").value !== "none";
  let body = null;
  try {
    body = request();
  } catch (error) {
    trouble(error);
    undo();
    return;
  }
  const show = writer(words, !body.tools);
  let answer = null;
  at("bars").hidden = true;
  try {
    await write(body, key(), stopper.signal, (so, pieces) => {
      answer = so;
      show(so, pieces);
      figures(so);
    });
    const plain = compare ? await again(body, answer, turn) : null;
    note(turn, summary(answer, plain));
  } catch (error) {
    if (error.name !== "AbortError") trouble(error);
    const ended = answer?.timings ? summary(answer) : `Stopped after ${answer?.tokens} tokens`;
    if (answer) note(turn, ended);
  }
  if (answer?.text || answer?.timings) {
    const thoughts = answer.thought ? { reasoning_content: answer.thought } : {};
    const made = answer.calls.length ? { tool_calls: answer.calls } : {};
    mine.push({ role: "assistant", content: answer.text, ...made, ...thoughts });
    if (mine === chat) open = [...answer.calls];
    prompted();
    return;
  }
  undo();

  // There is no answer: remove the question.
  function undo() {
    mine.pop();
    asked.turn.remove();
    turn.remove();
    if (mine === chat) {
      open = left;
      at("message").value ||= text;
    }
    prompted();
    at("welcome").hidden = chat.length > 0;
  }
}

// Generates the same answer with plain decoding, to time it; it is not shown.
async function again(body, answer, turn) {
  const waiting = made("p", "Generating it again with plain decoding …", "note");
  turn.append(waiting);
  at("status").textContent = waiting.textContent;
  try {
    const same = { ...body, speculation: { drafter: "none", pieces: true } };
    const plain = await write(same, key(), stopper.signal, (so) => bars(answer, so));
    compared(answer, plain);
    return plain;
  } finally {
    waiting.remove();
  }
}

function trouble(error) {
  at("alert").textContent = error.message;
  if (error.status === 401) at("key").focus();
}

function busy(yes) {
  stopper = yes ? new AbortController() : null;
  at("stop").disabled = !yes;
  at("send").disabled = yes;
  at("log").setAttribute("aria-busy", yes);
}

async function send() {
  const text = at("message").value.trim();
  if (stopper || !text) return;
  const left = [at("send"), document.body].includes(document.activeElement);
  at("alert").textContent = "";
  at("message").value = "";
  busy(true);
  if (left) at("stop").focus();
  try {
    await turn(text);
  } finally {
    const onStop = [at("stop"), document.body].includes(document.activeElement);
    busy(false);
    if (onStop) at("message").focus();
  }
}

// -- the page -------------------------------------------------------------------------------------

async function greet() {
  try {
    const { data } = await (await ask("v1/models", key())).json();
    const several = data.length > 1;
    at("choice").replaceChildren(...data.map(({ id }) => made("option", id)));
    at("choice").value = (data.find(({ status }) => status?.value === "loaded") ?? data[0]).id;
    at("models").hidden = !several;
    at("model").hidden = several;
    at("model").textContent = data[0].id;
    document.title = several ? "paceline" : `${data[0].id} · paceline`;
    at("alert").textContent = "";
  } catch (error) {
    trouble(error);
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopper?.abort();
});
at("stop").addEventListener("click", () => stopper?.abort());
at("clear").addEventListener("click", () => {
  stopper?.abort();
  chat = [];
  open = [];
  prompted();
  for (const turn of at("log").querySelectorAll("article")) turn.remove();
  at("welcome").hidden = false;
  at("message").focus();
});
at("key").addEventListener("change", greet);
greet();
