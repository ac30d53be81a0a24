"""Commands with Hugging Face names, in separate processes with a fake hub through HF_ENDPOINT."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fake_hub import FakeHub, FakeRepository, serving
from support.process import Run, started, stopped_line
from support.waiting import PATIENCE, until

NAME = "owner/tiny"
F16 = "tiny-F16.gguf"


@pytest.fixture
def fake(environment: dict[str, str], tiny_gguf: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """A fake hub with the tiny model for the commands."""
    with serving() as found:
        environment.pop("HF_TOKEN", None)
        environment.update(found.environment(tmp_path / "home"))
        environment["PACELINE_CACHE"] = str(tmp_path / "cache")
        environment["OLLAMA_MODELS"] = str(tmp_path / "no-ollama")
        found.repositories[NAME] = FakeRepository({F16: tiny_gguf.read_bytes(), "README.md": b""})
        yield found


def test_a_pulled_hugging_face_model_works_offline(
    fake: FakeHub, run: Run, refused: Callable[..., str], tmp_path: Path
):
    found = run("pull", f"{NAME}:f16")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"{NAME}:f16 is ready in {tmp_path / 'cache'}")
    assert f"downloading {NAME}" in found.stderr
    fake.asked.clear()
    for name in (NAME, f"hf.co/{NAME}:F16"):
        answer = run(
            "generate", "hello", "--model", name, "--offline", "--max-tokens", 2, "--quiet"
        )
        assert answer.returncode == 0, answer.stderr
    assert run("pull", NAME, "--offline").returncode == 0
    said = refused("pull", "owner/other", "--offline")
    assert "not installed" in said
    assert "--offline" in said
    assert fake.asked == []
    listed = {each["name"]: each for each in json.loads(run("models", "--json").stdout)}
    mine = listed[f"{NAME}:F16"]
    assert mine["here"]
    assert mine["fits"]
    assert mine["file"].endswith(F16)


def test_offline_mode_does_not_download_the_default_model(fake: FakeHub, refused: Any):
    assert "cannot download smollm2-135m" in refused("pull", "--offline")


def test_ctrl_c_during_a_download_keeps_partial_data_for_the_next_command(
    fake: FakeHub, run: Run, environment: dict[str, str], tiny_gguf: Path, tmp_path: Path
):
    # What is after the last tensor is not read.
    fake.repositories[NAME] = FakeRepository({F16: tiny_gguf.read_bytes() + bytes(25_000_000)})
    fake.stall_after = 15_000_000
    blobs = tmp_path / "home" / "hub" / f"models--{NAME.replace('/', '--')}" / "blobs"
    with started(environment, "pull", NAME) as child:
        until(lambda: any(path.stat().st_size >= 10_000_000 for path in blobs.glob("*.incomplete")))
        os.killpg(child.pid, signal.SIGINT)
        _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == 130
    stopped_line(said)
    (part,) = blobs.iterdir()
    kept = part.stat().st_size
    fake.stall_after = None
    assert run("pull", NAME).returncode == 0
    assert fake.downloads()[-1].range == f"bytes={kept}-"
    assert not part.exists()
