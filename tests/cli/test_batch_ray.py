"""`paceline batch --ray` on a local cluster of two nodes; an actor and a node are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.process import command_lines
from support.waiting import PATIENCE

pytestmark = pytest.mark.soak

pytest.importorskip("ray", reason="ray is not installed")


def texts(path: Path) -> dict[str, Any]:
    rows = map(json.loads, path.read_text().splitlines())
    return {row["custom_id"]: row["response"]["body"]["token_ids"] for row in rows}


def workers() -> list[int]:
    """Processes of actors with a model."""
    return [pid for pid, line in command_lines() if line.startswith(b"ray::Worker")]


def test_killing_an_actor_or_a_node_loses_no_line(tiny_gguf: Path, cache: Path, tmp_path: Path):
    from ray.cluster_utils import Cluster

    source, alone, ray = (tmp_path / name for name in ("in.jsonl", "alone.jsonl", "ray.jsonl"))
    lines = [{"prompt": f"this is {number}", "max_tokens": 60} for number in range(300)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-m", "paceline", "batch", str(source), "--threads", "1"]
    command += ["--model", str(tiny_gguf), "--temperature", "0", "-o"]
    subprocess.run([*command, str(alone)], timeout=PATIENCE, check=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        part = ray.with_name("ray.jsonl.part")
        run = subprocess.Popen([*command, str(ray), "--ray", cluster.address])

        def wait(count: int) -> None:
            end = time.monotonic() + PATIENCE
            while not (part.exists() and part.read_bytes().count(b"\n") >= count):
                assert run.poll() is None, "it ended too early to kill something"
                assert time.monotonic() < end
                time.sleep(0.05)

        wait(10)
        os.kill(workers()[0], signal.SIGKILL)
        wait(100)
        cluster.remove_node(node, allow_graceful=False)
        assert run.wait(timeout=2 * PATIENCE) == 0
    finally:
        cluster.shutdown()
    assert texts(ray) == texts(alone)
    assert len(texts(ray)) == 300
