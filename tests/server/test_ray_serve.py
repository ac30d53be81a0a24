"""deploy/ray_serve.py on a local cluster of two nodes: sessions stay, and a replica is killed."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import paceline
from support.process import command_lines
from support.scripts import ROOT, script
from support.waiting import PATIENCE

pytestmark = pytest.mark.soak

pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

URL = "http://127.0.0.1:8000/v1/completions"
TEXT = "is the number that this text begins with, " * 3


def replicas() -> list[int]:
    return [pid for pid, line in command_lines() if line.startswith(b"ray::ServeReplica")]


def ask(prompt: str, session: str) -> Any:
    """Send a prompt, again while no replica takes it."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            response = httpx.post(URL, json=body, headers={"X-Session-Id": session}, timeout=60)
        except httpx.TransportError:
            continue
        if response.status_code == 200:
            return response.json()
        time.sleep(0.2)
    raise TimeoutError(f"no replica answers: {response.text}")


def test_sessions_stay_with_their_replica_and_a_killed_replica_changes_no_text(
    tiny_gguf: Path, cache: Path
):
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    prompts = [f"{number} {TEXT}" for number in range(16)]
    options = {"model": str(tiny_gguf), "replicas": 2, "cache_tokens": 16 * 512}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        serve.run(script("ray_serve", ROOT / "deploy").build(options))
        assert len(replicas()) == 2
        with paceline.load(tiny_gguf) as model, ThreadPoolExecutor(4) as pool:

            def check(more: str) -> list[bool]:
                """Compare all texts; return whether each session's earlier prompt was cached."""
                sent = [prompt + more for prompt in prompts]
                cached = []
                for answer, text, prompt in zip(
                    pool.map(ask, sent, map(str, range(16))), sent, prompts, strict=True
                ):
                    expected = model.generate(text, raw=True, max_tokens=8, temperature=0)
                    assert answer["choices"][0]["text"] == expected.text
                    count = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    cached.append(count >= len(model.tokens(prompt, raw=True)) - 1)
                return cached

            # Ray's proxies do not all know both replicas at once.
            stay = any(all(check(f", and {turn}")) for turn in range(5))
            assert stay, "a session went to the other replica"
            os.kill(replicas()[0], signal.SIGKILL)
            cached = check(", and that")
            assert any(cached), "the other replica had no session"
            assert not all(cached), "the killed replica had no session"
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
