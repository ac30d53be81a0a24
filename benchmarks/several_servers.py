"""Throughput of two servers after nginx, as in deploy/nginx.conf, over that of one server.

    python benchmarks/several_servers.py --output benchmarks/results/several-servers.json

Eight clients, each with a key of its own, by which the proxy spreads them; greedy, the suite's
prompts, without prefix hits. Each round asks one server, one server through the proxy, and both
through the proxy, in rotating order. Exits with 1 if a text differs between the three. On one
machine the servers share its cores; on two machines they would not.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from clients.server import served

import paceline
from paceline.models import DEFAULT_MODEL
from paceline.verify.client import Endpoint, Sample, closed_loop, model_of
from paceline.verify.suite import SuitePrompt, load_suite

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.nginx import proxied

CLIENTS = 8
MAX_TOKENS = 128
ONE, ONE_PROXIED, TWO = "one server", "one server, proxied", "two servers, proxied"


def main() -> None:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = load_suite()
    with ExitStack() as stack:
        servers = [stack.enter_context(served([])) for _ in range(2)]
        ports = [urlsplit(server.url).port or 0 for server in servers]
        folders = [Path(stack.enter_context(TemporaryDirectory())) for _ in range(2)]
        same = stack.enter_context(proxied([ports[0], ports[0]], folders[0]))
        both = stack.enter_context(proxied(ports, folders[1]))
        urls = {ONE: servers[0].url, ONE_PROXIED: f"{same}/v1", TWO: f"{both}/v1"}
        rounds, texts = measured(urls, suite.prompts, options.rounds)
    result = {
        "command": "python benchmarks/several_servers.py",
        "engine": paceline.load(DEFAULT_MODEL).engine.describe(),
        "suite_sha256": suite.sha256,
        "prompts": len(suite.prompts),
        "clients": CLIENTS,
        "max_tokens": MAX_TOKENS,
        "tokens_per_second": rounds,
        "over_one": {
            name: round(median(a[name] / a[ONE] for a in rounds), 3) for name in (ONE_PROXIED, TWO)
        },
        "differing": sorted(prompt for prompt, found in texts.items() if len(found) > 1),
    }
    print(json.dumps(result, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(result["differing"]))


def measured(
    urls: dict[str, str], prompts: Sequence[SuitePrompt], rounds: int
) -> tuple[list[dict[str, float]], dict[str, set[str]]]:
    """Tokens per second of each variant in each round; the texts that each prompt got."""
    texts: dict[str, set[str]] = {}
    found = []
    names = [*urls]
    for number in range(rounds + 1):  # the first one warms up
        speeds = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started = perf_counter()
            samples = asked(urls[name], prompts)
            speeds[name] = sum(each.tokens for each in samples) / (perf_counter() - started)
            for each in samples:
                assert each.error is None, each.error
                texts.setdefault(each.prompt, set()).add(each.text)
        found.append(speeds)
    return found[1:], texts


def asked(url: str, prompts: Sequence[SuitePrompt]) -> list[Sample]:
    """Every prompt once, by eight clients that each have some of them."""
    extra: dict[str, Any] = {"cache_prompt": False}
    model = model_of(url)

    def client(number: int) -> Sequence[Sample]:
        own = prompts[number::CLIENTS]
        endpoint = Endpoint(url, model, MAX_TOKENS, f"client-{number}", extra)
        return closed_loop(endpoint, own, clients=1, requests=len(own)).samples

    with ThreadPoolExecutor(CLIENTS) as pool:
        return [each for samples in pool.map(client, range(CLIENTS)) for each in samples]


if __name__ == "__main__":
    main()
