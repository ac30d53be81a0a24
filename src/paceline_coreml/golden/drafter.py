"""Compares a drafter's artifact with itself, and with its network in torch in float32.

A drafter gets the same context rows in accepted blocks, one by one, all at once, and after rejected
rows. Its drafts must not depend on that, and must be bit-identical in the emulator. The target's
hidden states are random, because a target may be larger than memory, and they are normalized.
"""

from dataclasses import asdict
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest
from paceline.storage.report import Report
from paceline_coreml.conversion.families.dflash import open_drafter
from paceline_coreml.conversion.family import Family
from paceline_coreml.conversion.shards import Head, Layers
from paceline_coreml.conversion.torch_model import TorchPackage
from paceline_coreml.engine.artifact import Artifact
from paceline_coreml.engine.drafter import OpenDrafter
from paceline_coreml.engine.packages import REHEARSED, Packages, on_a_mac
from paceline_coreml.golden.checks import agreement, check_sizes, file_faults
from paceline_coreml.golden.compare import centred, cosines
from paceline_coreml.golden.run_shards import LOGITS
from paceline_coreml.golden.texts import tokenizer_faults
from paceline_coreml.options import ConversionOptions

Floats = npt.NDArray[np.float32]

ONE_BY_ONE, AT_ONCE, REJECTED = "rows one by one", "all rows at once", "after rejected rows"


_THRESHOLD = 0.99
"""Minimum cosine of logits, with the loss of compressed weights."""


def compare_drafter(
    opened: Artifact, checkpoint: Path, target: Path, *, rounding: str, count: int
) -> Report:
    """Compare an artifact with its checkpoint, in blocks after up to `count` rows.

    Raises InvalidRequest for more rows than slots, and ModelError like `open_drafter`.
    """
    if not 0 < count <= opened.slots:
        raise InvalidRequest(f"tokens is {count}; expected 1 to the {opened.slots} slots")
    options = ConversionOptions(rows=opened.rows // 2, slots=opened.slots)
    family, _ = open_drafter(checkpoint, target, options)
    check_sizes(opened, checkpoint, family)
    faults = [
        *tokenizer_faults(opened, target),
        *file_faults(opened, family),
    ]
    model = OpenDrafter(opened.folder, rounding=rounding)
    size = family.shape.input_size - opened.hidden_size
    states = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    blocks = {LOGITS: logits_of(model, states)}
    ways = [
        agreement(mode, {LOGITS: logits_of(model, states, mode)}, blocks)
        for mode in (ONE_BY_ONE, AT_ONCE, REJECTED)
    ]
    faults += [fault for way in ways for fault in way.faults(exact=not on_a_mac())]
    actual, expected = blocks[LOGITS], logits_of(in_torch(opened.folder, family), states)
    cosine = float(cosines(centred(actual), centred(expected)).min())
    equal = int((actual.argmax(1) == expected.argmax(1)).sum())
    if cosine < _THRESHOLD:
        faults.append(f"logits: cosine {cosine:.4f}, expected {_THRESHOLD} or more")
    value = {
        "artifact": opened.name,
        "fingerprint": opened.fingerprint,
        "units": None if on_a_mac() else REHEARSED,
        "rounding": None if on_a_mac() else rounding,
        "passed": not faults,
        "faults": faults,
        "ways": [asdict(way) for way in ways],
        "cosine": cosine,
        "top_tokens": [equal, len(actual)],
    }
    same = sum(way.difference == 0 for way in ways)
    lines = [
        f"blocks: {same} of {len(ways)} other modes have bit-identical drafts",
        f"logits: minimum cosine {cosine:.4f}; {equal} of {len(actual)} top tokens equal",
        *faults,
        f"verdict: {opened.name} {'is NOT' if faults else 'is'} equal to its network in float32"
        + ("" if on_a_mac() else " in the emulator; this shows nothing about the Neural Engine"),
    ]
    return Report(value, not faults, "\n".join(lines), [])


def logits_of(model: OpenDrafter, states: Floats, mode: str = "") -> Floats:
    """Return logits of blocks after 1, 1 + 2, 1 + 2 + 3, ... rows, [blocks * rows, vocab]."""
    context, blocks, before = model.open(), [], 0
    for step in cycle(range(1, model.rows + 1)):
        end = min(before + step, len(states))
        if mode == AT_ONCE:
            context, before = model.open(), 0
        if mode == REJECTED:
            context.inject(-states[before:end], before)
            context.run([end % 7], end, outputs=1)
            context.truncate(before)
        size = 1 if mode == ONE_BY_ONE else end - before
        for at in range(before, end, size):
            context.inject(states[at : at + size], at)
            block, _ = context.run([end % 7], end, outputs=model.rows)
        blocks.append(block)
        before = end
        if end == len(states):
            break
    return np.concatenate(blocks)


def in_torch(folder: Path, family: Family) -> OpenDrafter:
    """Open the artifact in `folder`, with a family's float32 modules in place of its packages."""
    shape = family.shape
    layers = TorchPackage(Layers(family, 0, shape.layers, (), stateless=False), "out_hidden")
    head = TorchPackage(Head(family, 0, shape.vocab_size), "logits")
    return OpenDrafter(folder, packages=Packages([layers], [head]))
