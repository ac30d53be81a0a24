"""Holding a converted artifact to itself and to transformers: `paceline coreml golden`.

Two questions. *Does a block say what single tokens say?* The artifact is run with calls of every
number of rows, and by the engine with single tokens and with rows that are rejected: all must say
the same, bit for bit where the rehearsal runs it. With one row a wrong order of heads and tokens
cannot be seen. *Is it the model?* What comes out of its shards is compared with transformers'
float32, layer by layer, and so are the logits and the picks (`compare` has the rules, `texts` says
what is asked). Outputs are held against every other layer of the reference, too: neighbouring
layers are so alike that a tap of the wrong one may have a good cosine.

Knows no command line. On any machine but a Mac the artifact is rehearsed: what passes here is
graph-correct, and nothing is said about the Neural Engine.
"""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

import paceline
from paceline.engines.coreml.artifact import CAUSAL_LM, read_artifact
from paceline.engines.coreml.packages import REHEARSED, on_a_mac
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.report import Report, Table
from paceline.tools.coreml.convert import RING
from paceline.tools.coreml.families import open_family
from paceline.tools.coreml.golden.checks import (
    Agreement,
    Picks,
    Seen,
    Texts,
    agreement,
    check_same_model,
    embedding_faults,
    look,
    picks,
    rotary_faults,
)
from paceline.tools.coreml.golden.compare import TOP, Nearness
from paceline.tools.coreml.golden.reference import Reference
from paceline.tools.coreml.golden.run_shards import Opening, run_engine, walk
from paceline.tools.coreml.golden.texts import beginning_faults, texts_for

TOKENS = 32
"""Of each text: several blocks of any artifact."""
THRESHOLD = 0.99
MARGIN = 0.5
"""In nats. INT8 weights, scaled by channel, turned picks of SmolLM2-135M by 0.16 at most."""


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
    """Check an artifact; the report says what does not hold, first things first.

    Args:
        artifact: the folder that `convert` made.
        checkpoint: the Hugging Face folder that it was made of. All of it is loaded as float32.
        rounding: of the rehearsal: "f16", or "f32" to see what is left without it.
        units: compute units, on a Mac.
        tokens: how long each text is.
        threshold: the least cosine of a row, after every layer that can be seen and of the logits.
        margin: how much lower than its own pick, in nats, the reference may rate the artifact's.
        progress: told how far it is.

    Raises:
        InvalidRequest: a value is out of range, or the model is no causal language model.
        ModelError: the artifact or the checkpoint is not whole, or they are of different models.
    """
    if not 0 < threshold <= 1:
        raise InvalidRequest(f"threshold is {threshold}; expected a cosine, above 0 and at most 1")
    if not (isfinite(margin) and margin >= 0):
        raise InvalidRequest(f"margin is {margin}; expected nats, 0 or more")
    opened = read_artifact(artifact)
    if opened.task != CAUSAL_LM:
        # Whole texts, no states, labels for picks: another pair of questions.
        raise InvalidRequest(
            f"{opened.name} is for {opened.task}; golden compares models for {CAUSAL_LM}"
        )
    family = open_family(checkpoint, slots=opened.slots, ring=RING)
    check_same_model(opened, family, checkpoint)
    embeddings = family.embeddings().numpy()
    asked = texts_for(opened, embeddings, tokens)
    files = [
        *beginning_faults(opened, checkpoint),
        *embedding_faults(opened, embeddings),
        *rotary_faults(opened, family),
    ]
    del embeddings
    with progress.task(f"running {checkpoint.name} with transformers"):
        reference = Reference(checkpoint)
        texts = Texts(asked, {text.name: reference.read(text.tokens) for text in asked})
        experts = reference.experts
        del reference  # as large as the model is in float32
    opening = Opening(units, rounding)
    walked = walk(opened, asked, opening, progress)
    blocks = walked.pop(opened.rows)
    ways = [agreement(f"calls of {w} rows", each, blocks) for w, each in walked.items()]
    ways += [
        agreement(way, each, blocks)
        for way, each in run_engine(opened, asked, opening, progress).items()
    ]
    seen = list(look(opened, texts, blocks, threshold))
    chosen = picks(opened, texts, blocks, threshold, margin)
    faults = [
        *files,
        *(fault for way in ways for fault in way.faults(exact=not on_a_mac())),
        *_layer_faults(seen, threshold, experts=experts),
        *chosen.faults(threshold, margin, experts=experts),
    ]
    value = {
        "paceline": paceline.__version__,
        "artifact": opened.name,
        "family": opened.family,
        "fingerprint": opened.fingerprint,
        "units": units if on_a_mac() else REHEARSED,
        "rounding": None if on_a_mac() else rounding,
        "rows": opened.rows,
        "threshold": threshold,
        "margin": margin,
        "judged_by": "median row" if experts else "worst row",
        "texts": [{"name": text.name, "tokens": list(text.tokens)} for text in asked],
        "passed": not faults,
        "faults": faults,
        "ways": [asdict(way) for way in ways],
        "layers": [asdict(place) for place in seen],
        "picks": asdict(chosen),
    }
    return Report(
        _for_json(value),
        not faults,
        "\n".join(_lines(opened.name, ways, seen, chosen, faults)),
        [_ways_table(ways, opened.rows), _layers_table(seen, chosen)],
    )


def _layer_faults(seen: Sequence[Seen], threshold: float, *, experts: bool) -> list[str]:
    """The first place that is not as it should be, and how many follow; wrong layers one by one."""
    found: list[str] = []
    bad = [(place, place.faults(threshold, experts=experts)) for place in seen]
    bad = [(place, faults) for place, faults in bad if faults]
    for place, faults in bad:
        if found and place.takes_for is None:
            continue
        where = "embeddings" if place.layer is None else f"layer {place.layer}"
        rest = ""
        if not found and len(bad) > 1:
            after = len(seen) - seen.index(place) - 1
            rest = f" (and {len(bad) - 1} of the {after} places after it)"
        found.append(f"{where}, {place.name}: {'; '.join(faults)}{rest}")
    return found


def _lines(
    name: str, ways: Sequence[Agreement], seen: Sequence[Seen], chosen: Picks, faults: Sequence[str]
) -> list[str]:
    worst = min(seen, key=lambda place: place.nearness.cosine.worst)
    sink = max(seen, key=lambda place: place.nearness.first_length)
    small = max(seen, key=lambda place: place.nearness.small.worst)
    same = sum(way.difference == 0 for way in ways)
    parity, logits = chosen.ordinary, chosen.nearness.cosine
    return [
        f"blocks: {same} of {len(ways)} other ways of calling say the same, bit for bit",
        f"layers: least cosine {worst.nearness.cosine.worst:.4f} ({worst.name}, "
        f"{worst.nearness.cosine.at}), seen at {len(seen)} places",
        f"first position: up to {sink.nearness.first_length:.0f} times as long as an ordinary row "
        f"({sink.name}), judged apart: least cosine "
        f"{min(place.nearness.first for place in seen):.4f}",
        f"low norm: off by up to {small.nearness.small.worst:.3f} of an ordinary row "
        f"({small.name})",
        f"logits: least cosine {logits.worst:.4f} ({logits.at}), divergence "
        f"{parity.divergence:.4f} nats",
        f"picks: {parity.equal} of {parity.rows} equal; {parity.decided_equal} of the "
        f"{parity.decided} that are decided; {parity.contained} among the {TOP} best",
        *faults,
        f"verdict: {name} {'is NOT' if faults else 'is'} {_what()}",
    ]


def _what() -> str:
    if on_a_mac():
        return "the model, as run here"
    return "graph-correct, as rehearsed; nothing is said about the Neural Engine"


def _ways_table(ways: Sequence[Agreement], rows: int) -> Table:
    return (
        f"other ways of calling, against calls of {rows} rows",
        ["way", "largest difference", "least cosine", "from"],
        [[way.way, f"{way.difference:.3g}", f"{way.cosine:.6f}", way.begins] for way in ways],
    )


def _layers_table(seen: Sequence[Seen], chosen: Picks) -> Table:
    rows = [
        ["" if place.layer is None else str(place.layer), place.name, *_numbers(place.nearness)]
        for place in seen
    ]
    rows.append(["", "logits", *_numbers(chosen.nearness)])
    head = ["layer", "output", "least cosine", "median", "length", "first", "its length"]
    return "beside transformers in float32", [*head, "low norm", "largest"], rows


def _numbers(near: Nearness) -> list[str]:
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
    """The same, with null for numbers that JSON has no word for."""
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _for_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_for_json(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
