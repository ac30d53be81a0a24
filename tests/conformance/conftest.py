from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine, KVSequence
from paceline.models import QUIET, ModelFiles
from support import mlx
from support.coreml import SMALLER, tiny_source
from support.engine_rows import Plain, Rows, run
from support.llamacpp import library
from support.networks import FORMS, NETWORKS, Case, MakeCase
from support.tiny import Type, write_tiny
from support.tiny_checkpoints import write_gguf_of
from support.toy import ToyEngine

# What an engine here must be like: a context of at least 160 slots, a cache that holds ten
# sequences of 64 and that a few full contexts fill. A factory may call pytest.skip.
ENGINES: dict[str, Callable[[pytest.FixtureRequest], Engine]] = {
    "toy": lambda _: ToyEngine(),
    "toy-padded": lambda _: ToyEngine(min_rows=2, best=True),
    "openvino": lambda request: _openvino(request.getfixturevalue("tiny_files")),
    "openvino-lfm2": lambda request: _hybrid("lfm2", request),
    "openvino-lfm2_moe": lambda request: _hybrid("lfm2_moe", request),
    "openvino-qwen3_5": lambda request: _hybrid("qwen3_5_text", request),
    "openvino-qwen3_5_moe": lambda request: _hybrid("qwen3_5_moe_text", request),
    "llamacpp": lambda request: _llamacpp("ik_llama.cpp", request.getfixturevalue("tiny_gguf")),
    "llamacpp-packed": lambda request: _packed("ik_llama.cpp", request),
    "llamacpp-upstream": lambda request: _llamacpp(
        "llama.cpp", request.getfixturevalue("tiny_gguf")
    ),
    "llamacpp-lfm2": lambda request: _llamacpp_hybrid("lfm2", request),
    "llamacpp-lfm2_moe": lambda request: _llamacpp_hybrid("lfm2_moe", request),
    "llamacpp-qwen3_5": lambda request: _llamacpp_hybrid("qwen3_5_text", request),
    "llamacpp-qwen3_5_moe": lambda request: _llamacpp_hybrid("qwen3_5_moe_text", request),
    "coreml": lambda request: _coreml(request.getfixturevalue("tmp_path_factory")),
    **{f"mlx-{name}": partial(mlx.engine, name) for name in mlx.CASES},
}

MARKS = {"coreml": pytest.mark.coreml, "mlx": pytest.mark.mlx}


def _openvino(files: ModelFiles) -> Engine:
    settings = EngineSettings(cache_tokens=3 * files.context_length)
    return open_engine("openvino", files.path, files.context_length, settings)


def _hybrid(form: str, request: pytest.FixtureRequest) -> Engine:
    """A model with recurrent layers beside attention."""
    folder = request.getfixturevalue("tmp_path_factory").mktemp(form)
    settings = EngineSettings(cache_tokens=3 * 512)
    return open_engine("openvino", write_gguf_of(form, folder / "m.gguf"), 512, settings)


def _llamacpp(name: str, path: Path) -> Engine:
    from paceline.engines.llamacpp.engine import LlamaCppEngine

    # Threads of a busy machine wait for each other in every product: tests have one.
    settings = EngineSettings(cache_tokens=3 * 512, threads=1)
    return LlamaCppEngine(path, 512, settings, binding=library(name))


def _llamacpp_hybrid(form: str, request: pytest.FixtureRequest) -> Engine:
    """A model with recurrent layers beside attention, in the library that rolls states back."""
    folder = request.getfixturevalue("tmp_path_factory").mktemp(form)
    # It refuses tokens that are none: wrong drafts of an odd vocabulary's last one would be.
    return _llamacpp("llama.cpp", write_gguf_of(form, folder / "m.gguf", vocab_size=320))


def _packed(name: str, request: pytest.FixtureRequest) -> Engine:
    """Weights of 8 bits, from a packed copy, which a file of this size does not get by itself."""
    from paceline.engines.llamacpp import packed
    from paceline.engines.llamacpp.engine import LlamaCppEngine

    folder = request.getfixturevalue("tmp_path_factory").mktemp("packed")
    settings = EngineSettings(cache_tokens=3 * 512, threads=1, packed=folder / "copies")
    path = write_tiny(folder / "m.gguf", weights=Type.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_LEAST", 0)
        engine = LlamaCppEngine(path, 512, settings, binding=library(name))
    assert "packed weights" in engine.describe()["rows"]
    return engine


def _coreml(folders: pytest.TempPathFactory) -> Engine:
    """Rehearsed here; on a Mac, Core ML itself."""
    for module in ("coremltools", "torch", "transformers"):
        pytest.importorskip(module)
    from paceline.engines.coreml.engine import CoreMlEngine
    from paceline.tools.coreml.conversion_options import ConversionOptions
    from paceline.tools.coreml.convert import convert

    folder = folders.mktemp("coreml")
    # Most blocks are one call, some are two or more.
    recipe = ConversionOptions(topology="1+1", head_rows=50, slots=192, rows=12)
    made = convert(tiny_source(folder, **SMALLER), folder / "made", recipe, progress=QUIET)
    return CoreMlEngine(made.folder, EngineSettings(cache_tokens=24 * 192), rounding="f32")


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=MARKS.get(name.partition("-")[0], [])) for name in ENGINES],
)
def engine(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param](request)


@pytest.fixture(scope="module")
def plain(engine: Engine) -> Plain:
    """Logits of every row of a text in a sequence of its own, given how many tokens are a prompt.

    The prompt is read at once, and the answer comes one token at a time.
    """
    known: dict[tuple[int, ...], Rows] = {}

    def rows_of(text: Sequence[int], prompt: int) -> Rows:
        key = (prompt, *text)
        if key not in known:
            rows = []
            with closing(engine.open()) as sequence:
                if prompt:
                    rows += run(engine, prompts=[(sequence, text[:prompt], prompt)])
                    sequence.commit(prompt)
                for token in text[prompt:]:
                    rows += run(engine, (sequence, [token], 1))
                    sequence.commit(1)
            known[key] = np.concatenate(rows)
        return known[key]

    return rows_of


@pytest.fixture
def sequence(engine: Engine) -> Iterator[KVSequence]:
    with closing(engine.open()) as opened:
        yield opened


@pytest.fixture
def other(engine: Engine) -> Iterator[KVSequence]:
    with closing(engine.open()) as opened:
        yield opened


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.mlx if name == "mlx" else ()) for name in NETWORKS
    ],
)
def make_case(
    request: pytest.FixtureRequest,
    tiny_files: ModelFiles,
    tmp_path_factory: pytest.TempPathFactory,
) -> MakeCase:
    if request.param == "mlx":
        mlx.needs()
    return lambda *form, **more: Case.make(
        tiny_files, tmp_path_factory.mktemp("drafter"), *form, runtime=request.param, **more
    )


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(*FORMS[request.param])


@pytest.fixture(scope="module")
def case(make_case: MakeCase) -> Case:
    return make_case()
