"""A fake llama-server for our client, with failures on request.

It answers each request with the tokens after the prompt's last one, as numbers. $FAKE_WAY is one
way of failing; into $FAKE_LOG goes a line of JSON for its start, and one for each request. While
it runs as a server, it has a shared lock of that file.
"""

import fcntl
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

WAY = os.environ.get("FAKE_WAY", "")
LOOKUPS = {"": "none,draft-simple,ngram-simple,ngram-mod,ngram-cache", "some": "[none|ngram-mod]"}


def note(**facts: Any) -> None:
    with Path(os.environ["FAKE_LOG"]).open("a", encoding="utf-8") as log:
        log.write(json.dumps(facts) + "\n")


def write(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def value(option: str) -> str:
    return sys.argv[sys.argv.index(option) + 1] if option in sys.argv else ""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(503 if WAY == "loading" else 200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(path=self.path, body=body)
        if WAY == "dies":
            write("ggml_abort: error: out of memory")
            os._exit(3)
        if WAY == "hangs":
            time.sleep(600)
        if self.headers["Authorization"] != f"Bearer {os.environ['LLAMA_API_KEY']}":
            self.reply(401, {"error": "no key"})
        elif WAY == "refuses":
            self.reply(400, {"error": {"message": "the prompt\nis too long"}})
        else:
            self.reply(200, completion(body))

    def reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def completion(body: dict[str, Any]) -> dict[str, Any]:
    count = body["n_predict"]
    tokens = [5 + (body["prompt"][-1] + i) % 20 for i in range(count)]
    timings = {"prompt_ms": 250.0, "predicted_n": count, "predicted_ms": 500.0 * (count - 1)}
    if value("--spec-type"):
        timings |= {"draft_n": 6, "draft_n_accepted": 4, "predicted_ms": 250.0 * (count - 1)}
    if WAY == "silent":
        return {"content": "text", "timings": timings}
    return {"content": "text", "tokens": [] if WAY == "old" else tokens, "timings": timings}


def main() -> None:
    if "--version" in sys.argv:
        write("version: 9876 (abcdef)\nbuilt with a test")
    elif "--help" in sys.argv:
        types = LOOKUPS.get(WAY, LOOKUPS[""])
        write("--port PORT  port to listen")
        write("" if WAY == "unspeculative" else f"--spec-type {types}\n  (default: none)")
    elif WAY == "ends":
        write("srv load_model: failed to load model, 'x.gguf'\n  exiting  \n")
        sys.exit(1)
    else:
        with Path(os.environ["FAKE_LOG"]).open("a", encoding="utf-8") as log:
            fcntl.flock(log, fcntl.LOCK_SH)
            note(argv=sys.argv[1:], settings=[name for name in os.environ if "LLAMA_ARG" in name])
            HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    main()
