"""DFlash in Core ML: drafts for targets of each engine, in its own process's rehearsal."""

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoding.policy import Fixed
from paceline.decoding.sampling import Sampling
from paceline.decoding.stopping import Stopping
from paceline.drafters import DrafterResources, RequestContext, create, read_facts, taps
from paceline.engines import EngineSettings
from paceline.engines.llamacpp.engine import LlamaCppEngine
from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET
from paceline.storage.manifest import MANIFEST
from paceline_coreml.conversion.convert import convert
from paceline_coreml.conversion.families.dflash import open_drafter
from paceline_coreml.conversion.source import Source, open_source
from paceline_coreml.engine.engine import CoreMlEngine
from paceline_coreml.golden import report
from paceline_coreml.golden.drafter import in_torch
from paceline_coreml.lint import lint
from paceline_coreml.options import ConversionOptions
from support import mlx
from support.coreml import FACTS, convert_source, tiny_llama, tiny_source
from support.dflash import tiny_config, write_checkpoint
from support.driver import answer, generation, run
from support.errors import raises
from support.heads import GREEDY
from support.llamacpp import library
from support.tiny import write_tiny

pytestmark = [pytest.mark.coreml, pytest.mark.slow]

SLOTS, BLOCK = 96, 8
CONFIG = tiny_config(
    vocab_size=mlx.VOCAB,
    mask_token_id=mlx.VOCAB - 1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    block_size=BLOCK,
)
PROMPT = np.random.default_rng(0).integers(3, mlx.VOCAB - 1, 20).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    mlx.needs()
    return mlx.checkpoint(tmp_path_factory.mktemp("target") / "target", "llama")


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    write_checkpoint(folder, CONFIG, kind="F32")
    return folder


def converted(drafter: Path, target: Path, out: Path, **options: Any) -> Path:
    about = {"kind": "drafter", "from": str(drafter), "target": str(target)}
    tokenizer = target / "tokenizer.json"
    source = Source("tiny", about, "tiny", drafter, tokenizer, None, FACTS, target)
    settings = {"weights": "f16", "slots": SLOTS, "head_rows": 100, "topology": "1+1", **options}
    return convert(source, out, ConversionOptions(**settings), progress=QUIET).folder


@pytest.fixture(scope="module")
def artifact(drafter: Path, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(drafter, target, tmp_path_factory.mktemp("artifact") / "a")


def test_core_ml_drafts_are_bit_identical_for_any_chunking(
    artifact: Path, drafter: Path, target: Path, tmp_path: Path
):
    for rounding in ("f16", "engine"):
        checked = report(artifact, drafter, target=target, rounding=rounding, progress=QUIET)
        assert checked.passed, checked.text
        assert [way["difference"] for way in checked.value["ways"]] == [0, 0, 0]
    assert checked.value["cosine"] > 0.999
    assert [one for one in lint(artifact) if one.verdict == "fail"] == []
    write_checkpoint(tmp_path / "other", CONFIG, seed=1, kind="F32")
    assert not report(artifact, tmp_path / "other", target=target, progress=QUIET).passed
    write_checkpoint(tmp_path / "taps", replace(CONFIG, taps=(1, 0)), kind="F32")
    with raises(ModelError, "was not converted from", "taps=(0, 1)", "taps=(1, 0)"):
        report(artifact, tmp_path / "taps", target=target, progress=QUIET)
    short = converted(drafter, target, tmp_path / "short", rows=4, stateless=True, weights="int8")
    assert report(short, drafter, target=target, progress=QUIET).passed


@pytest.mark.parametrize("bits", [None, 4])
def test_the_reference_matches_the_mlx_network(
    bits: int | None, drafter: Path, target: Path, tmp_path: Path
):
    import mlx.core as mx

    from paceline_mlx.heads.cache import NewRows
    from paceline_mlx.heads.dflash.network import Network

    if bits is not None:
        target = mlx.quantized(target, tmp_path / "quantized", bits=bits)
    artifact = converted(drafter, target, tmp_path / "artifact")
    engine = opened(target)
    network = Network(drafter, engine.model)
    states = np.random.default_rng(1).normal(size=(11, 128)).astype(np.float32)
    heard: list[np.ndarray] = []
    logits = network._logits
    network._logits = lambda rows: heard.append(np.array(logits(rows))) or logits(rows)  # type: ignore
    options = ConversionOptions(slots=SLOTS)
    network.draft(network.new_cache(), 7, 11, NewRows(mx.array(states), 0), sampler=GREEDY)
    context = in_torch(artifact, open_drafter(drafter, target, options)[0]).open()
    context.inject(states, 0)
    ours, _ = context.run([7], 11, outputs=BLOCK)
    np.testing.assert_allclose(ours[1:], heard[0], atol=5e-3)  # embeddings are f16


def opened(target: Path) -> Any:
    from paceline_mlx.engine import MlxEngine

    settings = EngineSettings(cache_tokens=2048, taps=(0, 1))
    return MlxEngine(target, mlx.CONTEXT, settings, rules=mlx.rules(1, 32))


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=3),
    Sampling(logit_bias={9: 100.0}),  # every draft is accepted, so the next one is ready
]


@pytest.fixture(scope="module", params=["mlx", "mlx in 4 bits", "llamacpp", "coreml"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DrafterResources]:
    """An artifact, and a target of each engine that it drafts for."""
    folder, engine = tmp_path_factory.mktemp("running"), request.param
    if engine == "llamacpp":
        files, size = write_tiny(folder / "tiny.gguf"), 320
        write_checkpoint(folder / "drafter", replace(CONFIG, vocab_size=size), kind="F32")
        ends = tiny_llama(folder / "ends", num_hidden_layers=2, vocab_size=size)
        (ends / "tokenizer.json").write_text("{}")
        artifact = converted(folder / "drafter", ends, folder / "artifact")
        settings = EngineSettings(cache_tokens=2048, taps=(0, 1), threads=1)
        target: Any = LlamaCppEngine(files, 512, settings, binding=library("llama.cpp"))
    else:
        artifact, files = (request.getfixturevalue(name) for name in ("artifact", "target"))
        if engine == "mlx in 4 bits":
            engine, files = "mlx", mlx.quantized(files, folder / "quantized")
            drafter = request.getfixturevalue("drafter")
            artifact = converted(drafter, files, folder / "artifact")
        target, size = opened(files) if engine == "mlx" else None, mlx.VOCAB
    if engine == "coreml":
        source = tiny_source(folder, files)
        sizes = {"functions": (2, 16), "taps": (0, 1), "slots": SLOTS, "weights": "f16"}
        files = convert_source(source, folder / "target", **sizes)
        target = CoreMlEngine(files, EngineSettings(taps=(0, 1)))
    return artifact, DrafterResources(engine=engine, opened=target, files=files, vocab_size=size)


@pytest.mark.parametrize("spec", ["dflash", "ahead:dflash"])
def test_a_core_ml_drafter_changes_no_token(running: tuple[Path, DrafterResources], spec: str):
    artifact, resources = running
    engine, name = resources.opened, f"{spec}:{artifact}"
    assert taps(name, resources) == (0, 1)
    for sampling, block in product(SAMPLINGS, (3, 12)):
        asked: Any = {"sampling": sampling, "stopping": Stopping(max_tokens=30)}
        context = RequestContext(sampling=sampling, prompt_length=len(PROMPT))
        (drafts,) = create(name, resources, context)
        going = generation(engine, PROMPT, drafters=[drafts], policy=Fixed(block), **asked)
        assert run(engine, [going]) == [answer(engine, PROMPT, **asked)]
        assert going.counters.drafted_by["dflash"] > 10
    assert going.counters.accepted > 10
    assert getattr(drafts, "used", 1) > 0


def test_an_unsupported_core_ml_drafter_is_a_one_line_error(
    artifact: Path, drafter: Path, target: Path, tmp_path: Path
):
    shared = DrafterResources(engine="mlx", files=target, vocab_size=mlx.VOCAB)
    out = tmp_path / "out"
    with raises(InvalidRequest, "rows is 9", "blocks of 8"):
        converted(drafter, target, out, rows=9)
    with raises(InvalidRequest, "functions", "--rows"):
        converted(drafter, target, out, functions=(2, 4))
    for change, words in {
        "num_target_layers": "number of target layers is 3, the target's 2",
        "vocab_size": "vocabulary is 161, the target's 160",
    }.items():
        other = replace(CONFIG, **{change: getattr(CONFIG, change) + 1})
        write_checkpoint(tmp_path / change, other)
        with raises(ModelError, "for another target", words):
            converted(tmp_path / change, target, out)
    write_checkpoint(tmp_path / "window", replace(CONFIG, windows=(None, 16)))
    with raises(ModelError, "sliding window"):
        converted(tmp_path / "window", target, out)
    narrow = mlx.checkpoint(tmp_path / "deeper", "llama", num_hidden_layers=3)
    with raises(ModelError, "for another target", "number of target layers is 2"):
        taps(f"dflash:{artifact}", replace(shared, files=narrow))
    with raises(InvalidRequest, "is a drafter", "--target"):
        open_source(str(drafter), tmp_path, QUIET)
    with raises(InvalidRequest, "is a drafter for Qwen3-8B; give its target", "--target"):
        open_source("z-lab/Qwen3-8B-DFlash-b16", tmp_path, QUIET)
    with raises(InvalidRequest, "cannot draft ahead", "--to coreml"):
        taps(f"ahead:dflash:{drafter}", shared)
    with raises(InvalidRequest, "no option 'bits'", "expected none"):
        create(f"dflash:{artifact},bits=4", shared)
    half = Path(shutil.copytree(artifact, tmp_path / "half"))
    next(half.glob("layers*/**/weight.bin")).unlink()
    with raises(ModelError, "weight.bin"):
        taps(f"dflash:{half}", shared)
    (half / MANIFEST).unlink()  # as an interrupted conversion leaves it
    with raises(ModelError, "half"):
        taps(f"dflash:{half}", replace(shared, engine="coreml"))
    facts = read_facts(artifact)
    assert facts is not None
    assert (facts.kind, facts.form, facts.hidden_size, facts.layers) == ("dflash", "DFlash", 64, 2)
