// The API's client: asks, and reads streams.
//
// Knows HTTP, server-sent events and what the chat endpoint says in them. Knows nothing of the page.

export class Refused extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, key, more = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { "X-Api-Key": key }) };
  const response = await fetch(path, { headers, ...more }).catch((error) => {
    throw error.name === "AbortError" ? error : new Refused("The server does not answer.");
  });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refused(told?.error?.message ?? `The server said ${response.status}.`, response.status);
}

// Server-sent events, each of one line, as the server writes them.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused("The server hung up before the answer had ended.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// One answer to `body`; `heard` is told of it after each chunk, with the tokens that are new.
export async function write(body, key, signal, heard) {
  const answer = { text: "", thought: "", tokens: 0, steps: 0, drafted: 0, accepted: 0 };
  const asked = performance.now();
  const sent = { method: "POST", body: JSON.stringify(body), signal };
  for await (const chunk of events(await ask("v1/chat/completions", key, sent))) {
    if (chunk.error) throw new Refused(chunk.error.message);
    const { delta, pieces = [], speculation } = chunk.choices[0];
    answer.text += delta.content ?? "";
    answer.thought += delta.reasoning_content ?? "";
    answer.tokens += pieces.length;
    Object.assign(answer, speculation);
    if (!answer.begun && pieces.length) {
      answer.begun = performance.now();
      answer.first = answer.begun - asked;
      answer.early = pieces.length;
    }
    if (chunk.timings) {
      answer.timings = chunk.timings;
      answer.about = chunk.speculation;
    }
    heard(answer, pieces);
  }
  return answer;
}

// Tokens per second after the first: by the server's clock when it has ended, until then by ours.
export function speed(answer) {
  if (answer.timings) return answer.timings.predicted_per_second;
  const seconds = (performance.now() - answer.begun) / 1e3;
  return answer.tokens > answer.early ? (answer.tokens - answer.early) / seconds : 0;
}
