"""llama-benchy measures the server, with the prefix cache and without.

    python benchmarks/clients/llama_benchy.py

It must finish, have a result for every case, and have prefix cache hits exactly where it enables
the cache. Its figures are of one run on a machine under other load: they are printed, not recorded.
"""

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trial import Trial, main

from paceline.models import DEFAULT_MODEL, resolve
from paceline.verify.suite import load_suite

PROMPT, ANSWER, DEPTH, RUNS, AT_ONCE = 128, 32, 256, 2, (1, 4)
HITS = "paceline_prompt_cache_hits_total"


def work(trial: Trial) -> None:
    """Run it with and without the prefix cache."""
    lines = [str(m["content"]) for prompt in load_suite().prompts for m in prompt.messages]
    (trial.folder / "book.txt").write_text("\n\n".join(lines * 4), encoding="utf-8")
    handler = partial(_Silent, directory=str(trial.folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        book = f"http://127.0.0.1:{server.server_port}/book.txt"
        for option, caching in (("--no-cache", False), ("--enable-prefix-caching", True)):
            before = trial.server.metric(HITS)
            found = _run(trial, book, option)
            _check(trial, found, option, caching=caching)
            hits = trial.server.metric(HITS) - before
            # Its warm-up may have hits in both modes; they are less than a prompt.
            right = hits > RUNS * DEPTH if caching else hits < PROMPT
            trial.check(right, f"{option}: {hits:.0f} tokens were found in the cache")
        server.shutdown()


def _run(trial: Trial, book: str, option: str) -> Any:
    result = trial.folder / f"result{option}.json"
    result.unlink(missing_ok=True)
    done = trial.run(
        "llama-benchy",
        *("--base-url", trial.server.url, "--model", DEFAULT_MODEL, "--book-url", book),
        *("--tokenizer", str(resolve(DEFAULT_MODEL).folder), "--pp", str(PROMPT)),
        *("--tg", str(ANSWER), "--exact-tg", "--depth", "0", str(DEPTH), "--runs", str(RUNS)),
        *("--concurrency", *map(str, AT_ONCE), "--exit-on-first-fail", "--no-results-on-fail"),
        # Its question for the capital of France is sampled, and this model is small.
        *("--skip-coherence", "--extra-body", "temperature=0"),
        *("--format", "json", "--save-result", str(result), option),
    )
    return json.loads(result.read_text()) if done.returncode == 0 else None


def _check(trial: Trial, found: Any, option: str, *, caching: bool) -> None:
    if found is None:
        return
    rows = found["benchmarks"]
    # With a cache the context is read once by itself, which is a row of its own.
    expected = len(AT_ONCE) * (3 if caching else 2)
    trial.equal(len(rows), expected, f"{option}: there is a row for each case")
    for row in rows:
        part = ", the context" if row["is_context_prefill_phase"] else ""
        where = f"depth {row['context_size']}{part}, {row['concurrency']} at once"
        rates = {name: row[name] for name in ("pp_throughput", "tg_throughput", "ttfr")}
        trial.check(all(rate and rate["mean"] > 0 for rate in rates.values()), f"{option}: {where}")
        line = ", ".join(f"{name} {rate['mean']:.1f}" for name, rate in rates.items() if rate)
        print(f"    {line}")


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    main(__doc__, ["llama-benchy==0.4.*"], work)
