"""Compares a converted artifact with itself and with transformers: `paceline coreml golden`.

*Do blocks give the same outputs as single tokens?* The artifact runs with every number of rows per
forward pass, and in the engine with single tokens and rejected rows. All outputs must be equal, and
bit-identical in the emulator. A single row would not reveal a wrong order of heads and tokens. A
token classifier, which has no states, runs each text alone and packed: only zero terms differ.

*Is it the same model?* Layer outputs, logits and top tokens are compared with transformers in
float32 (`compare` has the criteria, `texts` the inputs). Outputs are also compared with other
layers of the reference, because a neighboring layer's tap may also have a good cosine. For a
classifier, labels and scores are compared.

Off a Mac, the artifact runs in the emulator. A passed check then shows that the graph is correct,
but nothing about the Neural Engine.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

import paceline
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.coreml import EMBEDDINGS
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST
from paceline.storage.report import Report, Table
from paceline_coreml.conversion.convert import CONV_SLOTS
from paceline_coreml.conversion.families import open_family
from paceline_coreml.engine.artifact import read_artifact
from paceline_coreml.engine.packages import DEFAULT_UNITS, REHEARSED, on_a_mac
from paceline_coreml.golden.checks import (
    Agreement,
    FaultLimits,
    LayerCheck,
    LogitsCheck,
    agreement,
    check_layers,
    check_logits,
    check_sizes,
    file_faults,
    layer_faults,
)
from paceline_coreml.golden.compare import TOP
from paceline_coreml.golden.drafter import compare_drafter
from paceline_coreml.golden.reference import Reference
from paceline_coreml.golden.run_shards import (
    embed,
    run_classifier,
    run_engine,
    run_shards,
)
from paceline_coreml.golden.texts import rows_of, texts_for, tokenizer_faults

TOKENS = 32
"""Default text length: several blocks of any artifact."""
THRESHOLD = 0.99
MARGIN = 0.5
"""Maximum nats between the reference's top token and the artifact's, in the reference's logits.

Per-channel INT8 weights changed top tokens of SmolLM2-135M at margins up to 0.16."""


def report(
    artifact: Path,
    checkpoint: Path,
    *,
    target: Path | None = None,
    rounding: str = "f16",
    tokens: int = TOKENS,
    threshold: float = THRESHOLD,
    progress: Progress,
) -> Report:
    """Compare an artifact with its checkpoint; the report lists faults in order of computation.

    Args:
        artifact: the folder that `convert` wrote.
        checkpoint: the Hugging Face folder of its source, loaded as float32.
        target: the target's folder, if it is a drafter.
        rounding: rounding of the emulator: "f16", "f32" to exclude rounding, or "engine".
        tokens: length of each text.
        threshold: minimum cosine of any row, in every layer output and the logits.
        progress: reports packages and texts.

    Raises:
        InvalidRequest: a value is out of range.
        ModelError: the artifact or the checkpoint is incomplete, or they are different models.
    """
    if not 0 < threshold <= 1:
        raise InvalidRequest(f"threshold is {threshold}; expected a cosine, above 0 and at most 1")
    opened = read_artifact(artifact)
    if target is not None:
        return compare_drafter(
            opened, checkpoint, target, rounding=rounding, count=tokens, threshold=threshold
        )
    family = open_family(checkpoint, slots=opened.slots, conv_slots=opened.ring or CONV_SLOTS)
    check_sizes(opened, checkpoint, family)
    embeddings = family.embeddings().numpy()
    texts = texts_for(opened, embeddings, tokens)
    rows = rows_of(texts)
    faults = [*tokenizer_faults(opened, checkpoint), *file_faults(opened, family, embeddings)]
    del embeddings
    soft = read_json(artifact / MANIFEST).get("recipe", {}).get("routing") == "soft"
    with progress.task(f"running {checkpoint.name} with transformers"):
        model = Reference(checkpoint, opened.task, soft=soft)
        reference = model.run_all([text.tokens for text in texts])
        # With soft routing, rounding cannot flip the choice of an expert.
        limits = FaultLimits(threshold, MARGIN, model.experts and not soft)
        del model  # in float32
    layers: list[LayerCheck] = []
    if opened.labels:
        blocks, modes = run_classifier(opened, texts, rounding, progress)
    else:
        by_width = run_shards(opened, texts, rounding, progress)
        blocks = by_width.pop(opened.decode_rows)
        modes = {f"calls of {width} rows": outputs for width, outputs in by_width.items()}
        modes |= run_engine(opened, texts, rounding, progress)
        embedded = {EMBEDDINGS: np.concatenate([embed(opened, text) for text in texts])}
        layers += check_layers(opened, rows, {**embedded, **blocks}, reference, limits)
    ways = [agreement(mode, outputs, blocks) for mode, outputs in modes.items()]
    logits = check_logits(opened, rows, blocks, reference, limits)
    trained: LogitsCheck | None = None
    if soft:
        top_1 = Reference(checkpoint).run_all([text.tokens for text in texts])
        trained = check_logits(opened, rows, blocks, top_1, limits)
    exact = not (on_a_mac() or opened.labels)
    faults += [fault for way in ways for fault in way.faults(exact=exact)]
    faults += [*layer_faults(layers, limits), *logits.faults(limits)]
    value = {
        "paceline": paceline.__version__,
        "artifact": opened.name,
        "family": opened.family,
        "fingerprint": opened.fingerprint,
        "units": DEFAULT_UNITS if on_a_mac() else REHEARSED,
        "rounding": None if on_a_mac() else rounding,
        "rows": opened.decode_rows,
        "threshold": threshold,
        "margin": MARGIN,
        "judged_by": "median row" if limits.experts else "worst row",
        "texts": [{"name": text.name, "tokens": list(text.tokens)} for text in texts],
        "passed": not faults,
        "faults": faults,
        "ways": [asdict(way) for way in ways],
        "layers": [asdict(layer) for layer in layers],
        "picks": asdict(logits),
        **({"top_1": asdict(trained)} if trained else {}),
    }
    verdict = "graph-correct in the emulator; this shows nothing about the Neural Engine"
    verdict = "equal to the model on this Mac" if on_a_mac() else verdict
    lines = [
        *_lines(ways, layers, logits, "labels" if opened.labels else "top tokens"),
        *([_distance(trained)] if trained else []),
        *faults,
        f"verdict: {opened.name} {'is NOT' if faults else 'is'} {verdict}",
    ]
    base = "texts alone" if opened.labels else f"calls of {opened.decode_rows} rows"
    tables = [_ways_table(ways, base), _layers_table(layers, logits)]
    # JSON has neither NaN nor infinities.
    value = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return Report(value, not faults, "\n".join(lines), tables)


def _lines(
    ways: Sequence[Agreement], layers: Sequence[LayerCheck], logits: LogitsCheck, best: str
) -> Iterator[str]:
    picks, logits_cosine = logits.ordinary, logits.nearness.cosine
    same = sum(way.difference == 0 for way in ways)
    yield f"blocks: {same} of {len(ways)} other modes have bit-identical outputs"
    if layers:
        worst = min(layers, key=lambda layer: layer.nearness.cosine.worst)
        cosine = worst.nearness.cosine
        yield (
            f"layers: minimum cosine {cosine.worst:.4f} ({worst.name}, {cosine.at}), over "
            f"{len(layers)} outputs"
        )
    yield (
        f"logits: minimum cosine {logits_cosine.worst:.4f} ({logits_cosine.at}), divergence "
        f"{picks.divergence:.4f} nats"
    )
    yield (
        f"{best}: {picks.equal} of {picks.rows} equal; {picks.decided_equal} of the "
        f"{picks.decided} clear ones; {picks.contained} in the top {TOP}"
    )


def _distance(trained: LogitsCheck) -> str:
    """Describe how far soft routing is from the trained routing."""
    picks, cosine = trained.ordinary, trained.nearness.cosine
    return (
        f"soft routing, compared with top-1: logits' median cosine {cosine.median:.4f}, divergence "
        f"{picks.divergence:.4f} nats; {picks.equal} of {picks.rows} top tokens equal"
    )


def _ways_table(ways: Sequence[Agreement], base: str) -> Table:
    return (
        f"other modes, compared with {base}",
        ["mode", "largest difference", "minimum cosine", "first output"],
        [[way.way, f"{way.difference:.3g}", f"{way.cosine:.6f}", way.begins] for way in ways],
    )


def _layers_table(layers: Sequence[LayerCheck], logits: LogitsCheck) -> Table:
    places = [
        ("" if one.layer is None else str(one.layer), one.name, one.nearness) for one in layers
    ]
    rows = [
        [
            layer,
            name,
            *(f"{cosine:.5f}" for cosine in (near.cosine.worst, near.cosine.median)),
            f"{near.length.worst:.3f}",
            f"{near.first:.5f}",
            f"{near.first_length:.3g}",
            f"{near.small.worst:.3f}",
            f"{near.largest:.4g}",
        ]
        for layer, name, near in [*places, ("", "logits", logits.nearness)]
    ]
    head = ["layer", "output", "min cosine", "median", "length", "first", "its length"]
    return "compared with transformers in float32", [*head, "low norm", "largest"], rows
