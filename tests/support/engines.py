"""The engines that all conformance tests run, each with a tiny model."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from paceline.engines import EngineSettings
from paceline.engines.base import Engine
from paceline.models import QUIET
from support import mlx
from support.coreml import SMALLER, tiny_source
from support.families import write_gguf_of
from support.llamacpp import library
from support.tiny import Type, write_tiny
from support.toy import ToyEngine

HYBRIDS = {
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Names of models with recurrent and attention layers -> forms of `families.py`."""


def _llamacpp(name: str, path: Path, parallel: int = 1) -> Engine:
    from paceline.engines.llamacpp.engine import LlamaCppEngine

    # Threads of a busy machine wait for each other in every product: tests have one.
    settings = EngineSettings(cache_tokens=3 * 512, threads=1, parallel=parallel)
    engine = LlamaCppEngine(path, 512, settings, binding=library(name))
    assert engine.shares_calls == (parallel > 1)
    return engine


def _on_device(path: Path, *, whole: bool) -> Engine:
    """All layers on a device of the library that LLAMA_CPP_LIB_PATH names, or the last ones."""
    from paceline.engines.llamacpp import libraries
    from paceline.engines.llamacpp.engine import open_llamacpp

    binding = library("llama.cpp")
    found = binding.devices()
    if not found:
        pytest.skip(f"{binding.version} has no device")
    settings = EngineSettings(cache_tokens=3 * 512, threads=1, device=found[0].name)
    with pytest.MonkeyPatch.context() as patch:
        if not whole:
            little = found[0]._replace(free=libraries._RESERVE + (600 << 10))
            patch.setattr(binding, "devices", lambda: [little])
        engine = open_llamacpp(path, 512, settings, binding)
    assert ("all layers" in engine.describe()["device"]) is whole
    return engine


def _llamacpp_hybrid(form: str, request: pytest.FixtureRequest) -> Engine:
    """A model with recurrent and attention layers, in the library that rolls states back."""
    folder = request.getfixturevalue("tmp_path_factory").mktemp(form)
    # It refuses tokens that are none: wrong drafts of an odd vocabulary's last one would be.
    return _llamacpp("llama.cpp", write_gguf_of(form, folder / "m.gguf", vocab_size=320))


def _packed(name: str, request: pytest.FixtureRequest) -> Engine:
    """8-bit weights from a packed copy, which a file of this size does not get by default."""
    from paceline.engines.llamacpp import packed
    from paceline.engines.llamacpp.engine import LlamaCppEngine

    folder = request.getfixturevalue("tmp_path_factory").mktemp("packed")
    settings = EngineSettings(cache_tokens=3 * 512, threads=1, packed=folder / "copies")
    path = write_tiny(folder / "m.gguf", weights=Type.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_MIN_BYTES", 0)
        engine = LlamaCppEngine(path, 512, settings, binding=library(name))
    assert "packed weights" in engine.describe()["rows"]
    return engine


def _coreml(folders: pytest.TempPathFactory) -> Engine:
    from paceline_coreml.conversion.convert import convert
    from paceline_coreml.engine.engine import CoreMlEngine
    from paceline_coreml.options import ConversionOptions

    folder = folders.mktemp("coreml")
    # Most blocks are one call, some are two or more.
    recipe = ConversionOptions(topology="1+1", head_rows=50, slots=192, rows=12)
    artifact = convert(tiny_source(folder, **SMALLER), folder / "made", recipe, progress=QUIET)
    return CoreMlEngine(artifact.folder, EngineSettings(cache_tokens=24 * 192), rounding="f32")


# What an engine here must be like: a context of at least 160 slots, a cache that holds ten
# sequences of 64 and that a few full contexts fill.
ENGINES: dict[str, Callable[[pytest.FixtureRequest], Engine]] = {
    "toy": lambda _: ToyEngine(),
    "toy-padded": lambda _: ToyEngine(min_rows=2, best=True),
    "llamacpp": lambda request: _llamacpp("ik_llama.cpp", request.getfixturevalue("tiny_gguf")),
    "llamacpp-packed": lambda request: _packed("ik_llama.cpp", request),
    "llamacpp-upstream": lambda request: _llamacpp(
        "llama.cpp", request.getfixturevalue("tiny_gguf")
    ),
    "llamacpp-shared": lambda request: _llamacpp(
        "llama.cpp", request.getfixturevalue("tiny_gguf"), parallel=4
    ),
    **{f"llamacpp-{name}": partial(_llamacpp_hybrid, form) for name, form in HYBRIDS.items()},
    "coreml": lambda request: _coreml(request.getfixturevalue("tmp_path_factory")),
    **{f"mlx-{name}": partial(mlx.engine, name) for name in mlx.CASES},
}
if os.environ.get("LLAMA_CPP_LIB_PATH"):
    ENGINES |= {
        f"llamacpp-{name}": lambda request, whole=whole: _on_device(
            request.getfixturevalue("tiny_gguf"), whole=whole
        )
        for name, whole in (("device", True), ("part-device", False))
    }
NEEDS = {
    "llamacpp": "ik_llama.cpp",
    "llamacpp-packed": "ik_llama.cpp",
    "llamacpp-upstream": "llama.cpp",
    "llamacpp-shared": "llama.cpp",
    **{f"llamacpp-{name}": "llama.cpp" for name in HYBRIDS},
    **{f"mlx-{name}": "mlx" for name in mlx.CASES},
}
"""Engine -> its name in `NEEDED` of `packages.py`, where tests need a package for it."""
QUICK = {"toy", "toy-padded", "llamacpp"}
"""Engines that tests run with `-m "not slow"`; the others take minutes together."""
