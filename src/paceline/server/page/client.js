// Client of the API: requests and streams. Independent of the page.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, key, more = {}) {
  const headers = { "Content-Type": "application/json", ...(key && { "X-Api-Key": key }) };
  const response = await fetch(path, { headers, ...more }).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError("The server does not respond: is it running?");
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `The server returned ${response.status}.`, response.status);
}

// Server-sent events, each of one line, as the server writes them; also the comments of a prefill.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const closed = new ApiError("The connection was closed before the end of the answer.");
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : closed;
    });
    if (done) throw closed;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
      const prefill = /^: prefill (\d+)\/(\d+)$/.exec(line);
      if (prefill) yield { prefill: prefill.slice(1) };
    }
  }
}

// Requests an answer: a chat's, or with a `prompt` a completion. Calls `onChunk` with the answer so
// far and the new tokens after each chunk, and `onPrefill` with how many tokens of how many of a long
// prompt are read. `prompt` and `ids` are token ids, if they were asked for.
export async function write(body, key, signal, onChunk, onPrefill = () => {}) {
  const answer = { text: "", thought: "", calls: [], tokens: 0, steps: 0, drafted: 0, accepted: 0 };
  Object.assign(answer, { prompt: [], ids: [], reason: null });
  const start = performance.now();
  const post = { method: "POST", body: JSON.stringify(body), signal };
  const path = body.prompt ? "v1/completions" : "v1/chat/completions";
  for await (const chunk of events(await ask(path, key, post))) {
    if (chunk.prefill) {
      onPrefill(...chunk.prefill);
      continue;
    }
    if (chunk.error) throw new ApiError(chunk.error.message);
    const [choice] = chunk.choices;
    const { delta = { ...choice, content: choice.text }, pieces = [] } = choice;
    answer.text += delta.content ?? "";
    answer.thought += delta.reasoning_content ?? "";
    for (const { index, id, function: part } of delta.tool_calls ?? []) {
      answer.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } };
      answer.calls[index].function.name += part?.name ?? "";
      answer.calls[index].function.arguments += part?.arguments ?? "";
    }
    answer.prompt = chunk.prompt_token_ids ?? answer.prompt;
    answer.ids.push(...(choice.token_ids ?? []));
    answer.reason = choice.finish_reason ?? answer.reason;
    answer.tokens += pieces.length;
    Object.assign(answer, choice.speculation);
    if (!answer.begun && pieces.length) {
      answer.begun = performance.now();
      answer.first = answer.begun - start;
      answer.early = pieces.length;
    }
    if (chunk.timings) {
      answer.timings = chunk.timings;
      answer.about = chunk.speculation;
    }
    onChunk(answer, pieces);
  }
  return answer;
}

// Tokens per second after the first: measured by the server at the end, before that by the page.
export function speed(answer) {
  if (answer.timings) return answer.timings.predicted_per_second;
  const seconds = (performance.now() - answer.begun) / 1e3;
  return answer.tokens > answer.early ? (answer.tokens - answer.early) / seconds : 0;
}
