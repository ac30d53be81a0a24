"""Soak test: under mixed load for minutes, memory stays flat and answers stay the same.

    python benchmarks/soak.py --seconds 600

Starts `paceline serve` and sends requests from several clients: streamed and whole, greedy and
seeded, cached and new prompts, cache salts, JSON schemas and tools, several choices, invalid
requests, and disconnects. The server's resident memory is read once a second. It may grow by
`--tolerance` from the median of the first quarter to that of the last, counted from `--warm-up`
seconds after the KV cache was full: by then every prefill thread has allocated all that it will.
Exits with 1 if it grows more, if an answer differs from an earlier one to the same request, if the
server fails, or if it does not become idle.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from time import monotonic, sleep, time
from typing import Any

import httpx

import paceline
from paceline.cli.options import default_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SYSTEM = "You are a careful assistant. Answer in few words, and never invent anything. " * 6
QUESTIONS = [
    "Say this again, twice: the quick brown fox jumps over the lazy dog.",
    "Count from one to twenty, with commas.",
    "What is the capital of France, and on which river does it lie?",
    "Write a line each about a cat, a dog and a crow.",
]
WORDS = (
    "river",
    "stone",
    "cloud",
    "seven",
    "green",
    "paper",
    "engine",
    "quiet",
    "orange",
    "window",
)
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
]
KINDS = {
    **{"chat": 4, "text": 4, "new": 3, "salted": 1, "form": 2, "new form": 1, "tools": 1},
    **{"several": 1, "predicted": 1, "wrong": 1, "too long": 1, "leaves": 3},
}
"""Kind of request -> relative frequency."""

_FILLING_SECONDS = 600


def request(kind: str, drawn: random.Random) -> tuple[str, dict[str, Any]]:
    """Path and body of a random request of a kind."""
    body: dict[str, Any] = {"max_tokens": drawn.choice((8, 24, 64)), **drawn.choice(SAMPLINGS)}
    body["stream"] = drawn.random() < 0.5
    if kind in ("text", "new", "salted", "too long"):
        body["prompt"] = drawn.choice(QUESTIONS) * 3
        if kind == "new":
            body["prompt"] = " ".join(drawn.choices(WORDS, k=400))
        if kind == "salted":
            body["cache_salt"] = str(drawn.random())
        if kind == "too long":
            body["prompt"] = body["prompt"] * drawn.choice((2_000, 20_000))
        return TEXT, body
    system = {"role": "system", "content": SYSTEM}
    body["messages"] = [system, {"role": "user", "content": drawn.choice(QUESTIONS)}]
    if kind == "several":
        body |= {"n": 3, "logprobs": True, "top_logprobs": 5}
    if kind == "predicted":
        body["prediction"] = {"type": "content", "content": "one, two, three, four, five, six"}
    if kind == "wrong":
        body["temperature"] = -1
    if kind in ("form", "new form"):
        name = "answer" if kind == "form" else f"answer_{drawn.randrange(10**9)}"
        schema = {
            "type": "object",
            "properties": {name: {"type": "string", "maxLength": 20}},
            "required": [name],
            "additionalProperties": False,
        }
        wrapped = {"name": "x", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": wrapped}
    if kind == "tools":
        parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
        function = {"name": "weather", "parameters": parameters}
        body["tools"] = [{"type": "function", "function": function}]
    return CHAT, body


class Clients:
    """Clients that send requests until `over` is set, and the faults they found."""

    def __init__(self, url: str, seed: int) -> None:
        """Send requests to the server at `url`."""
        self.url = url
        self.counts = Counter[str]()
        self.faults: list[str] = []
        self.over = False
        self._drawn = random.Random(seed)
        self._known: dict[str, Any] = {}

    async def run(self, clients: int) -> None:
        """Send requests until `over` is set."""

        async def one(http: httpx.AsyncClient) -> None:
            while not self.over:
                (kind,) = self._drawn.choices(list(KINDS), list(KINDS.values()))
                try:
                    await self._send(http, kind)
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    self.faults.append(f"{kind}: {type(error).__name__}: {error}")
                self.counts[kind] += 1

        async with httpx.AsyncClient(timeout=120) as http:
            await asyncio.gather(*(one(http) for _ in range(clients)))

    async def _send(self, http: httpx.AsyncClient, kind: str) -> None:
        path, body = request(kind, self._drawn)
        if kind == "leaves":
            await self._disconnect(http, path, body)
            return
        response = await http.post(self.url + path, json=body)
        wanted = 400 if kind in ("wrong", "too long") else 200
        if response.status_code != wanted:
            self.faults.append(f"{kind}: status {response.status_code}: {response.text[:200]}")
        elif wanted == 200:
            self._compare(kind, body, _texts(response, streamed=body["stream"]))

    async def _disconnect(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
        """Disconnect while the request is queued, in prefill or in decode."""
        body["max_tokens"] = 400
        try:
            async with asyncio.timeout(self._drawn.choice((0.02, 0.3, 1.0))):
                await http.post(self.url + path, json=body)
        except TimeoutError:
            pass

    def _compare(self, kind: str, body: dict[str, Any], texts: Any) -> None:
        if kind in ("new", "new form", "salted"):
            return
        key = json.dumps({**body, "stream": None}, sort_keys=True)
        if self._known.setdefault(key, texts) != texts:
            self.faults.append(f"{kind}: {self._known[key]!r} before, {texts!r} now")


def _texts(response: httpx.Response, *, streamed: bool) -> Any:
    """Text of each choice by index; tool calls without their ids."""
    if streamed:
        # Not splitlines(): a text may have U+2028, which ends no line of server-sent events.
        lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
        parts = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        parts = [response.json()]
    found: dict[int, str] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        calls = [json.dumps(call["function"]) for call in said.get("tool_calls") or ()]
        text = (said.get("content") or "") + "".join(calls)
        found[choice["index"]] = found.get(choice["index"], "") + text
    return found


@contextmanager
def serving(arguments: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a server; yields its process and URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "paceline", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command)
    try:
        while process.poll() is None:
            with suppress(httpx.TransportError):
                httpx.get(url + "/health").raise_for_status()
                break
            sleep(0.1)
        else:
            raise SystemExit("the server did not start")
        yield process, url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def megabytes(process: int) -> float:
    """Resident memory of a process, in MiB."""
    found = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(process)], capture_output=True, text=True, check=True
    )
    return int(found.stdout) / 1024


def metric(url: str, name: str) -> float:
    """Value of a metric of the server."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


async def soak(
    process: int, clients: Clients, options: argparse.Namespace
) -> list[tuple[float, float]]:
    """(seconds, MiB) once a second after the warm-up.

    The warm-up begins when the KV cache is full: its memory is allocated on first write.
    """
    slots = metric(clients.url, "paceline_cache_free_slots")
    load = asyncio.ensure_future(clients.run(options.clients))
    samples: list[tuple[float, float]] = []
    began, warm = monotonic(), None
    while warm is None or monotonic() < warm + options.seconds:
        await asyncio.sleep(1)
        now, size = monotonic(), megabytes(process)
        if warm is not None and now >= warm:
            samples.append((now - warm, size))
        elif warm is not None:
            pass
        elif await asyncio.to_thread(metric, clients.url, "paceline_cache_free_slots") < slots / 8:
            warm = now + options.warm_up
        elif now > began + _FILLING_SECONDS:
            raise SystemExit("the KV cache did not fill up")
        asked = sum(clients.counts.values())
        print(f"{now - began:6.0f} s  {size:7.1f} MB  {asked:6} requests", end="\r")
    clients.over = True
    await load
    print()
    return samples


def becomes_idle(url: str) -> bool:
    """True if the server becomes idle: no requests, and no KV blocks in use."""
    names = ("requests_running", "requests_waiting", "cache_usage")
    for _ in range(300):
        sleep(0.1)
        if not any(metric(url, f"paceline_{name}") for name in names):
            return True
    return False


def served_engine(arguments: list[str]) -> dict[str, str]:
    """The description of the engine that `paceline serve` opens with these arguments."""

    def value(option: str, default: str) -> str:
        return arguments[arguments.index(option) + 1] if option in arguments else default

    model, engine = value("--model", default_model()), value("--engine", "auto")
    # Of several contexts, or `auto` would choose as for one answer at a time.
    return paceline.load(model, engine=engine, contexts=4).engine.describe()


def main() -> int:
    """Measure, print, and write the result to --output; returns 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--warm-up", type=float, default=180)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.03,
        help="largest growth, as a part of the first quarter's memory",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("serve", nargs="*", help="arguments of paceline serve, after --")
    options = parser.parse_args()
    with serving(options.serve) as (process, url):
        clients = Clients(url, options.seed)
        samples = asyncio.run(soak(process.pid, clients, options))
        idle = becomes_idle(url)
    quarter = len(samples) // 4
    first = median(size for _, size in samples[:quarter])
    last = median(size for _, size in samples[-quarter:])
    growth = last / first - 1
    found = {
        "command": "python benchmarks/soak.py " + " ".join(sys.argv[1:]),
        "engine": served_engine(options.serve),
        "at": int(time()),
        "requests": dict(clients.counts),
        "first_quarter_mb": first,
        "last_quarter_mb": last,
        "growth": growth,
        "tolerance": options.tolerance,
        "faults": clients.faults[:20],
        "comes_to_rest": idle,
        "exit_status": process.returncode,
        "megabytes_by_second": [round(size, 1) for _, size in samples],
    }
    print(f"first quarter {first:.1f} MB, last {last:.1f} MB: {growth:+.2%}")
    print(f"{sum(clients.counts.values())} requests, {len(clients.faults)} faults")
    for fault in clients.faults[:20]:
        print(f"  {fault}")
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    good = growth <= options.tolerance and not clients.faults and idle and not process.returncode
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
