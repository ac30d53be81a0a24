"""A minimal OpenAI-compatible server for libraries whose packages have none.

    python benchmarks/library_server.py {mistralrs,openvino} FILE.gguf --port PORT [--lookup]

It runs in the library's own environment, with the library's defaults, and hands concurrent requests
to it at once. A response is one event, sent when the text is complete. `--lookup`: prompt lookup in
OpenVINO GenAI's continuous batching, with the values of its own sample.
"""

import argparse
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

Answer = tuple[str, int, float | None]
"""The text, its number of tokens, and the first token's log-probability."""


def mistralrs(path: Path, _: argparse.Namespace) -> Callable[[dict[str, Any]], Answer]:
    """Return a function that answers a request with mistral.rs."""
    from mistralrs import ChatCompletionRequest, Runner, Which

    runner = Runner(which=Which.GGUF(str(path.parent), path.name))
    sending = threading.Lock()  # the runner takes one request at a time, and runs them together

    def answer(body: dict[str, Any]) -> Answer:
        scored = body.get("logprobs", False)
        request = ChatCompletionRequest(
            body["messages"],
            "default",
            max_tokens=body["max_tokens"],
            temperature=0.0,
            logprobs=scored,
            top_logprobs=1 if scored else None,
            stream=True,
        )
        with sending:
            stream = runner.send_chat_completion_request(request)
        chunks = [*stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        first = chunks[0].choices[0].logprobs.logprob if scored else None
        return text, chunks[-1].usage.completion_tokens, first

    return answer


def openvino(path: Path, options: argparse.Namespace) -> Callable[[dict[str, Any]], Answer]:
    """Return a function that answers a request with OpenVINO GenAI."""
    import openvino_genai as genai

    properties = {"INFERENCE_NUM_THREADS": options.threads} if options.threads else {}
    if options.lookup:
        properties["prompt_lookup"] = True
    scheduler = genai.SchedulerConfig()
    pipeline = genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)
    tokenizer, numbers, waiting = pipeline.get_tokenizer(), count(), threading.Semaphore(0)

    def run() -> None:
        while waiting.acquire():
            while pipeline.has_non_finished_requests():
                pipeline.step()

    threading.Thread(target=run, daemon=True).start()

    def answer(body: dict[str, Any]) -> Answer:
        config = genai.GenerationConfig(max_new_tokens=body["max_tokens"])
        if options.lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        if body.get("logprobs"):
            config.logprobs = 1
        prompt = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        handle = pipeline.add_request(next(numbers), prompt, config)
        waiting.release()
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            sleep(0.002)
        (output,) = handle.read_all()
        ids, scores = output.generated_ids, output.generated_log_probs
        return tokenizer.decode(ids), len(ids), scores[0] if scores else None

    return answer


def handler(answer: Callable[[dict[str, Any]], Answer]) -> type[BaseHTTPRequestHandler]:
    """Return a handler of requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send("application/json", json.dumps({"data": [{"id": "default"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text, tokens, score = answer(body)
            choice: dict[str, Any] = {"delta": {"content": text}, "finish_reason": "stop"}
            if score is not None:
                choice["logprobs"] = {"content": [{"logprob": score}]}
            event = {"choices": [choice], "usage": {"completion_tokens": tokens}}
            self._send("text/event-stream", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")

        def _send(self, kind: str, text: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

    return Handler


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    libraries = {"mistralrs": mistralrs, "openvino": openvino}
    parser.add_argument("library", choices=libraries)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--lookup", action="store_true")
    options = parser.parse_args()
    answer = libraries[options.library](options.model, options)
    with ThreadingHTTPServer(("127.0.0.1", options.port), handler(answer)) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
