// Figures of the last answer, and of speculation against plain decoding.
//
// Invariant: every figure was measured since the page was opened.

import { speed } from "./client.js";
import { at, one, percent, two } from "./dom.js";

const rate = (tokensPerSecond) => (tokensPerSecond ? one.format(tokensPerSecond) : "–");
const faster = (drafted, plain) => `${two.format(drafted / plain)} times as fast`;

const session = { answers: 0, drafted: { tokens: 0, ms: 0 }, plain: { tokens: 0, ms: 0 } };

export function figures(answer) {
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
  const drafters = Object.entries(about?.drafted_by ?? {});
  at("drafters").textContent =
    drafters.map(([name, all]) => `${name} ${about.accepted_by[name] ?? 0}/${all}`).join(", ") || "–";
}

export function bars(drafted, plain) {
  const speeds = { speculative: speed(drafted), plain: plain ? speed(plain) : 0 };
  const most = Math.max(speeds.speculative, speeds.plain) || 1;
  at("bars").hidden = false;
  for (const [name, value] of Object.entries(speeds)) {
    at("bars").querySelector(`.${name}`).style.setProperty("--share", value / most);
    at(`bar-${name}`).textContent = rate(value);
  }
}

// The line below an answer; `plain` is the same answer by plain decoding.
export function summary(answer, plain) {
  const parts = [`${answer.tokens} tokens`, `${rate(speed(answer))} tokens/s`];
  if (answer.drafted) parts.push(`${answer.accepted} of ${answer.drafted} draft tokens accepted`);
  if (plain) {
    parts.push(`plain ${rate(speed(plain))} tokens/s`);
    if (speed(plain)) parts.push(faster(speed(answer), speed(plain)));
    const same = plain.text === answer.text && plain.thought === answer.thought;
    parts.push(same ? "the same text" : "a different text");
  }
  return parts.join(" · ");
}

// Adds an answer that was generated both ways to the session's.
export function compared(answer, plain) {
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
