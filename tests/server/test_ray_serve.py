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
from support.scripts import ROOT, script
from support.waiting import PATIENCE

pytestmark = pytest.mark.soak

pytest.importorskip("ray.serve", reason="ray[serve] is not installed")

URL = "http://127.0.0.1:8000/v1/completions"
TEXT = "this is a text that both have, and number "


def replicas() -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::ServeReplica"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


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
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    # Else Ray's own router also sends all requests to the replica on the proxy's node.
    monkeypatch.setenv("RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        serve.run(
            script("ray_serve", ROOT / "deploy").build({"model": str(tiny_gguf), "replicas": 2})
        )
        assert len(replicas()) == 2
        with paceline.load(tiny_gguf) as model, ThreadPoolExecutor(4) as pool:
            prompts = [f"{TEXT}{number}" for number in range(8)]
            expected = [
                model.generate(one, raw=True, max_tokens=8, temperature=0).text for one in prompts
            ]

            def texts() -> list[str]:
                answers = pool.map(ask, prompts, map(str, range(8)))
                return [answer["choices"][0]["text"] for answer in answers]

            assert texts() == expected
            for number, prompt in enumerate(prompts):
                longer = ask(f"{prompt}, and this", str(number))
                cached = longer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= len(model.tokens(prompt, raw=True)) - 1, "it is another replica"
            os.kill(replicas()[0], signal.SIGKILL)
            assert texts() == expected
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
