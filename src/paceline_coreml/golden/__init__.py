"""Compares a converted artifact with itself and with transformers: `paceline coreml golden`.

*Do blocks give the same outputs as single tokens?* The artifact runs with every number of rows per
forward pass, and in the engine with single tokens and rejected rows. All outputs must be equal, and
bit-identical in the emulator. A single row would not reveal a wrong order of heads and tokens. A
token classifier, which has no states, runs each text alone and packed: only zero terms differ.

*Is it the same model?* Three comparisons, so that a wrong graph and lost precision have different
verdicts (`checks` has the criteria, `texts` the inputs):

    graph     emulator without rounding     transformers, float32, the artifact's weights
    format    the device, or rounding       emulator without rounding
    weights   transformers, float32, the artifact's weights      the checkpoint's weights

Any difference of the graph is a fault. The format may lose as much as transformers in float16. The
weights' loss is a divergence in nats, which is only a fault above `--max-divergence`. For a
classifier, labels and scores are compared.

Off a Mac, the artifact runs in the emulator. A passed check then shows that the graph is correct,
but nothing about the Neural Engine.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

import paceline
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.coreml import EMBEDDINGS
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST
from paceline.storage.report import Report, Table
from paceline_coreml.conversion.convert import CONV_SLOTS
from paceline_coreml.conversion.families import open_family
from paceline_coreml.conversion.family import Family
from paceline_coreml.engine.artifact import Artifact, read_artifact
from paceline_coreml.engine.packages import DEFAULT_UNITS, REHEARSED, on_a_mac
from paceline_coreml.golden.checks import (
    MARGIN,
    Agreement,
    FormatCheck,
    LayerCheck,
    LogitsCheck,
    agreement,
    check_layers,
    check_logits,
    check_sizes,
    file_faults,
    format_loss,
    layer_faults,
    weights_faults,
)
from paceline_coreml.golden.compare import TOP, Parity, centred, parity
from paceline_coreml.golden.drafter import compare_drafter
from paceline_coreml.golden.reference import Floats, Reference, ReferenceOutput
from paceline_coreml.golden.run_shards import (
    LOGITS,
    embed,
    run_classifier,
    run_engine,
    run_shards,
)
from paceline_coreml.golden.stored_weights import write_stored
from paceline_coreml.golden.texts import row_names, texts_for, tokenizer_faults

TOKENS = 32
"""Default text length: several blocks of any artifact."""


def report(
    artifact: Path,
    checkpoint: Path,
    *,
    target: Path | None = None,
    rounding: str = "f16",
    tokens: int = TOKENS,
    max_divergence: float | None = None,
    progress: Progress,
) -> Report:
    """Compare an artifact with its checkpoint; the report lists faults in order of computation.

    Off a Mac, `rounding` is "f16" or the Neural Engine's, "engine". Texts have `tokens` tokens. A
    drafter has a `target`. Compressed weights may cause a mean divergence of `max_divergence` nats,
    or any if it is None.

    Raises:
        InvalidRequest: a value is out of range.
        ModelError: the artifact or the checkpoint is incomplete, or they are different models.
    """
    opened = read_artifact(artifact)
    if target is not None:
        if max_divergence is not None:
            raise InvalidRequest("--max-divergence is not for drafters; remove it")
        return compare_drafter(opened, checkpoint, target, rounding=rounding, count=tokens)
    family = open_family(checkpoint, slots=opened.slots, conv_slots=opened.ring or CONV_SLOTS)
    check_sizes(opened, checkpoint, family)
    texts = texts_for(opened, tokens)
    inputs, rows = [text.tokens for text in texts], row_names(texts)
    # A classifier's embeddings are only checked by its labels.
    embedded = [] if opened.labels else [embed(opened, text) for text in texts]
    graph_faults = [*tokenizer_faults(opened, checkpoint), *file_faults(opened, family)]
    soft = read_json(artifact / MANIFEST).get("recipe", {}).get("routing") == "soft"
    with progress.task(f"running {checkpoint.name} with transformers"):
        original, reference, half, stored_faults = _references(
            opened, checkpoint, family, inputs, embedded, soft=soft
        )
    layers: list[LayerCheck] = []
    if opened.labels:
        blocks, modes = run_classifier(opened, texts, rounding, progress)
        graph, _ = run_classifier(opened, texts, "f32", progress)
    else:
        by_width = run_shards(opened, texts, rounding, progress)
        blocks = by_width.pop(opened.decode_rows)
        modes = {f"calls of {width} rows": outputs for width, outputs in by_width.items()}
        modes |= run_engine(opened, texts, rounding, progress)
        widths = [opened.decode_rows]
        (graph,) = run_shards(opened, texts, "f32", progress, widths=widths).values()
        before = {EMBEDDINGS: np.concatenate(embedded)}
        layers += check_layers(opened, rows, {**before, **graph}, reference)
    ways = [agreement(mode, outputs, blocks) for mode, outputs in modes.items()]
    logits = check_logits(rows, graph, reference)
    graph_faults += [*layer_faults(layers), *logits.faults(), *stored_faults]
    number_format = FormatCheck(
        format_loss(centred(blocks[LOGITS]), centred(graph[LOGITS])),
        format_loss(centred(half.logits), centred(reference.logits)),
    )
    weights = parity(rows, centred(reference.logits), centred(original.logits), MARGIN)
    trained = check_logits(rows, graph, Reference(checkpoint).run_all(inputs)) if soft else None
    exact = not (on_a_mac() or opened.labels)
    name = "Core ML" if on_a_mac() else rounding
    by_comparison = {
        "blocks": [fault for way in ways for fault in way.faults(exact=exact)],
        "graph": graph_faults,
        "format": number_format.faults(name),
        "weights": weights_faults(weights, max_divergence),
    }
    faults = [f"{what}: {fault}" for what, found in by_comparison.items() for fault in found]
    value = {
        "paceline": paceline.__version__,
        "artifact": opened.name,
        "family": opened.family,
        "fingerprint": opened.fingerprint,
        "units": DEFAULT_UNITS if on_a_mac() else REHEARSED,
        "rounding": None if on_a_mac() else rounding,
        "rows": opened.decode_rows,
        "texts": [{"name": text.name, "tokens": list(text.tokens)} for text in texts],
        "passed": not faults,
        "verdicts": {
            what: None if what == "weights" and max_divergence is None else not found
            for what, found in by_comparison.items()
        },
        "faults": faults,
        "ways": [asdict(way) for way in ways],
        "layers": [asdict(layer) for layer in layers],
        "picks": asdict(logits),
        "format": asdict(number_format),
        "weights": asdict(weights),
        **({"top_1": asdict(trained)} if trained else {}),
    }
    verdict = "graph-correct in the emulator; this shows nothing about the Neural Engine"
    verdict = "equal to the model on this Mac" if on_a_mac() else verdict
    best = "labels" if opened.labels else "top tokens"
    lines = [
        *_lines(ways, layers, logits),
        f"format: {name} loses {number_format.loss:.2g} of the median row's cosine; the "
        f"reference's own float16 run loses {number_format.reference_loss:.2g}",
        f"weights: {_distance(weights, best)}",
    ]
    if trained:
        lines.append(f"soft routing, compared with top-1: {_distance(trained.ordinary, best)}")
    lines += [*faults, f"verdict: {opened.name} {'is NOT' if faults else 'is'} {verdict}"]
    base = "texts alone" if opened.labels else f"calls of {opened.decode_rows} rows"
    layers.append(LayerCheck(LOGITS, None, logits.nearness))
    tables = [_ways_table(ways, base), _layers_table(layers)]
    # JSON has neither NaN nor infinities.
    value = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return Report(value, not faults, "\n".join(lines), tables)


def _references(
    artifact: Artifact,
    checkpoint: Path,
    family: Family,
    texts: Sequence[Sequence[int]],
    embedded: Sequence[Floats],
    *,
    soft: bool,
) -> tuple[ReferenceOutput, ReferenceOutput, ReferenceOutput, list[str]]:
    """Run the texts with transformers.

    Returns the outputs with the checkpoint's weights, with the artifact's weights and embeddings
    in float32 and in float16, and the faults of the artifact's weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        faults = write_stored(artifact, checkpoint, family, Path(folder))
        original = Reference(checkpoint, artifact.task, soft=soft).run_all(texts)
        stored, half = (
            Reference(Path(folder), artifact.task, soft=soft, dtype=dtype).run_all(texts, embedded)
            for dtype in (torch.float32, torch.float16)
        )
    return original, stored, half, faults


def _lines(
    ways: Sequence[Agreement], layers: Sequence[LayerCheck], logits: LogitsCheck
) -> Iterator[str]:
    same = sum(way.difference == 0 for way in ways)
    yield f"blocks: {same} of {len(ways)} other modes have bit-identical outputs"
    if layers:
        worst = min(layers, key=lambda layer: layer.nearness.cosine.worst)
        cosine = worst.nearness.cosine
        yield (
            f"graph: minimum cosine {cosine.worst:.5f} ({worst.name}, {cosine.at}), over "
            f"{len(layers)} outputs of layers"
        )
    cosine = logits.nearness.cosine
    yield f"graph: minimum cosine of logits {cosine.worst:.5f} ({cosine.at})"


def _distance(picks: Parity, best: str) -> str:
    return (
        f"divergence {picks.divergence:.4f} nats; {picks.equal} of {picks.rows} {best} equal, "
        f"{picks.decided_equal} of the {picks.decided} clear ones; {picks.contained} in the top "
        f"{TOP}"
    )


def _ways_table(ways: Sequence[Agreement], base: str) -> Table:
    return (
        f"other modes, compared with {base}",
        ["mode", "largest difference", "minimum cosine", "first output"],
        [[way.way, f"{way.difference:.3g}", f"{way.cosine:.6f}", way.begins] for way in ways],
    )


def _layers_table(checks: Sequence[LayerCheck]) -> Table:
    rows = [
        [
            "" if check.layer is None else str(check.layer),
            check.name,
            f"{near.cosine.worst:.5f}",
            f"{near.cosine.median:.5f}",
            f"{near.error.worst:.3g}",
            f"{near.largest:.4g}",
        ]
        for check in checks
        for near in [check.nearness]
    ]
    head = ["layer", "output", "min cosine", "median", "max error", "largest"]
    return "graph, compared with transformers in float32", head, rows
