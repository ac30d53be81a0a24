"""Compares a converted artifact with itself and with transformers: `paceline coreml golden`.

*Do blocks give the outputs of single tokens?* The artifact runs with calls of every number of rows,
and in the engine with single tokens and with rejected rows. All outputs must be equal, bit for bit
in the rehearsal. One row does not show a wrong order of heads and tokens.

*Is it the same model?* Layer outputs, logits and top tokens are compared with transformers in
float32 (`compare` has the criteria, `texts` the inputs). Outputs are also compared with the other
layers of the reference: a tap of a neighbouring layer may have a good cosine.

Except on a Mac the artifact runs in the rehearsal: a pass means graph-correct, and nothing about
the Neural Engine.
"""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import paceline
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.report import Report, Table
from paceline_coreml.conversion.convert import CONV_SLOTS
from paceline_coreml.conversion.families import open_family
from paceline_coreml.engine.artifact import CAUSAL_LM, read_artifact
from paceline_coreml.engine.packages import REHEARSED, on_a_mac
from paceline_coreml.golden.checks import (
    Agreement,
    LayerCheck,
    LogitsCheck,
    Texts,
    agreement,
    check_layers,
    check_logits,
    check_same_model,
    embedding_faults,
    rotary_faults,
)
from paceline_coreml.golden.compare import TOP, Nearness
from paceline_coreml.golden.reference import Reference
from paceline_coreml.golden.run_shards import PackageOptions, run_engine, run_shards
from paceline_coreml.golden.texts import texts_for, tokenizer_faults

TOKENS = 32
"""Length of a text: several blocks of any artifact."""
THRESHOLD = 0.99
MARGIN = 0.5
"""In nats. INT8 weights per channel changed top tokens of SmolLM2-135M at margins up to 0.16."""


def report(
    artifact: Path,
    checkpoint: Path,
    *,
    rounding: str = "f16",
    units: str = "cpu-and-ne",
    tokens: int = TOKENS,
    threshold: float = THRESHOLD,
    margin: float = MARGIN,
    progress: Progress,
) -> Report:
    """Compare an artifact with its checkpoint; the report lists faults, the first cause first.

    Args:
        artifact: the folder that `convert` wrote.
        checkpoint: the Hugging Face folder of its source, loaded as float32.
        rounding: of the rehearsal: "f16", "f32" to exclude rounding, or "engine".
        units: compute units, on a Mac.
        tokens: length of a text.
        threshold: minimum cosine of a row, of every layer output and of the logits.
        margin: by how many nats the reference may rate the artifact's top token below its own.
        progress: reports packages and texts.

    Raises:
        InvalidRequest: a value is out of range, or the model is not a causal language model.
        ModelError: the artifact or the checkpoint is incomplete, or they are different models.
    """
    if not 0 < threshold <= 1:
        raise InvalidRequest(f"threshold is {threshold}; expected a cosine, above 0 and at most 1")
    if not (isfinite(margin) and margin >= 0):
        raise InvalidRequest(f"margin is {margin}; expected nats, 0 or more")
    opened = read_artifact(artifact)
    if opened.task != CAUSAL_LM:
        # Classifiers have no states and no next token: these comparisons do not apply.
        raise InvalidRequest(
            f"{opened.name} is for {opened.task}; golden compares models for {CAUSAL_LM}"
        )
    family = open_family(checkpoint, slots=opened.slots, conv_slots=opened.ring or CONV_SLOTS)
    check_same_model(opened, family, checkpoint)
    embeddings = family.embeddings().numpy()
    inputs = texts_for(opened, embeddings, tokens)
    file_faults = [
        *tokenizer_faults(opened, checkpoint),
        *embedding_faults(opened, embeddings),
        *rotary_faults(opened, family),
    ]
    del embeddings
    with progress.task(f"running {checkpoint.name} with transformers"):
        reference = Reference(checkpoint)
        texts = Texts(inputs, {text.name: reference.run(text.tokens) for text in inputs})
        experts = reference.experts
        del reference  # the whole model in float32
    options = PackageOptions(units, rounding)
    by_width = run_shards(opened, inputs, options, progress)
    blocks = by_width.pop(opened.decode_rows)
    ways = [agreement(f"calls of {w} rows", outputs, blocks) for w, outputs in by_width.items()]
    ways += [
        agreement(way, outputs, blocks)
        for way, outputs in run_engine(opened, inputs, options, progress).items()
    ]
    layers = list(check_layers(opened, texts, blocks, threshold))
    logits = check_logits(opened, texts, blocks, threshold, margin)
    faults = [
        *file_faults,
        *(fault for way in ways for fault in way.faults(exact=not on_a_mac())),
        *_layer_faults(layers, threshold, experts=experts),
        *logits.faults(threshold, margin, experts=experts),
    ]
    value = {
        "paceline": paceline.__version__,
        "artifact": opened.name,
        "family": opened.family,
        "fingerprint": opened.fingerprint,
        "units": units if on_a_mac() else REHEARSED,
        "rounding": None if on_a_mac() else rounding,
        "rows": opened.decode_rows,
        "threshold": threshold,
        "margin": margin,
        "judged_by": "median row" if experts else "worst row",
        "texts": [{"name": text.name, "tokens": list(text.tokens)} for text in inputs],
        "passed": not faults,
        "faults": faults,
        "ways": [asdict(way) for way in ways],
        "layers": [asdict(layer) for layer in layers],
        "picks": asdict(logits),
    }
    return Report(
        _for_json(value),
        not faults,
        "\n".join(_lines(opened.name, ways, layers, logits, faults)),
        [_ways_table(ways, opened.decode_rows), _layers_table(layers, logits)],
    )


def _layer_faults(layers: Sequence[LayerCheck], threshold: float, *, experts: bool) -> list[str]:
    """The first faulty output with the number of others after it; swapped layers one by one."""
    messages: list[str] = []
    bad = [(layer, layer.faults(threshold, experts=experts)) for layer in layers]
    bad = [(layer, faults) for layer, faults in bad if faults]
    for layer, faults in bad:
        if messages and layer.takes_for is None:
            continue
        where = "embeddings" if layer.layer is None else f"layer {layer.layer}"
        rest = ""
        if not messages and len(bad) > 1:
            after = len(layers) - layers.index(layer) - 1
            rest = f" (and {len(bad) - 1} of the {after} outputs after it)"
        messages.append(f"{where}, {layer.name}: {'; '.join(faults)}{rest}")
    return messages


def _lines(
    name: str,
    ways: Sequence[Agreement],
    layers: Sequence[LayerCheck],
    logits: LogitsCheck,
    faults: Sequence[str],
) -> list[str]:
    worst = min(layers, key=lambda layer: layer.nearness.cosine.worst)
    sink = max(layers, key=lambda layer: layer.nearness.first_length)
    small = max(layers, key=lambda layer: layer.nearness.small.worst)
    same = sum(way.difference == 0 for way in ways)
    parity, cosine = logits.ordinary, logits.nearness.cosine
    return [
        f"blocks: {same} of {len(ways)} other call modes give the same outputs, bit for bit",
        f"layers: minimum cosine {worst.nearness.cosine.worst:.4f} ({worst.name}, "
        f"{worst.nearness.cosine.at}), over {len(layers)} outputs",
        f"first position: up to {sink.nearness.first_length:.0f} times as long as an ordinary row "
        f"({sink.name}), compared separately: minimum cosine "
        f"{min(layer.nearness.first for layer in layers):.4f}",
        f"low norm: off by up to {small.nearness.small.worst:.3f} of an ordinary row "
        f"({small.name})",
        f"logits: minimum cosine {cosine.worst:.4f} ({cosine.at}), divergence "
        f"{parity.divergence:.4f} nats",
        f"top tokens: {parity.equal} of {parity.rows} equal; {parity.decided_equal} of the "
        f"{parity.decided} decided ones; {parity.contained} in the top {TOP}",
        *faults,
        f"verdict: {name} {'is NOT' if faults else 'is'} {_verdict()}",
    ]


def _verdict() -> str:
    if on_a_mac():
        return "the model, as run here"
    return "graph-correct, as rehearsed; this shows nothing about the Neural Engine"


def _ways_table(ways: Sequence[Agreement], rows: int) -> Table:
    return (
        f"other call modes, compared with calls of {rows} rows",
        ["mode", "largest difference", "minimum cosine", "first output"],
        [[way.way, f"{way.difference:.3g}", f"{way.cosine:.6f}", way.begins] for way in ways],
    )


def _layers_table(layers: Sequence[LayerCheck], logits: LogitsCheck) -> Table:
    rows = [
        ["" if layer.layer is None else str(layer.layer), layer.name, *_cells(layer.nearness)]
        for layer in layers
    ]
    rows.append(["", "logits", *_cells(logits.nearness)])
    head = ["layer", "output", "min cosine", "median", "length", "first", "its length"]
    return "compared with transformers in float32", [*head, "low norm", "largest"], rows


def _cells(near: Nearness) -> list[str]:
    return [
        f"{near.cosine.worst:.5f}",
        f"{near.cosine.median:.5f}",
        f"{near.length.worst:.3f}",
        f"{near.first:.5f}",
        f"{near.first_length:.3g}",
        f"{near.small.worst:.3f}",
        f"{near.largest:.4g}",
    ]


def _for_json(value: Any) -> Any:
    """`value` with null for NaN and infinities, which JSON lacks."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _for_json(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(element) for element in value]
    return None if isinstance(value, float) and not isfinite(value) else value
