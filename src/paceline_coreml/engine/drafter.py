"""Drafts with a converted DFlash drafter, for targets of any engine that returns hidden states.

`drafters/native` decides what to draft and keep, as for drafters that llama.cpp runs; this file
implements its `OpenDrafter` and `DraftContext` with Core ML. A forward pass fills one block, and
also adds up to a block's length of new context rows, so decode needs one pass per draft.

    slots     . . c c c c n n . . | b b b b     c: keys and values of earlier rows; n: of new rows;
    mask      - - 0 0 0 0 0 0 - - | 0 0 0 0     b: of the block [last token, mask, ...]; -: hidden

Invariant: slots outside [first, length) are masked, so a dropped row needs no rollback.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.drafters.heads import HeadFacts, Sizes, check_fits, sizes_of
from paceline.drafters.native.block import BlockNetwork
from paceline.drafters.native.file import DraftFile
from paceline.errors import InvalidRequest, ModelError
from paceline.storage.coreml import EMBEDDINGS, is_core_ml
from paceline_coreml.engine.artifact import ROTARY, Artifact, Drafts, read_artifact
from paceline_coreml.engine.inputs import HIDDEN
from paceline_coreml.engine.packages import DEFAULT_UNITS, PackageOpener, Packages

Floats = npt.NDArray[np.float32]


class OpenDrafter:
    """The packages of a drafter; all requests share them."""

    def __init__(
        self, folder: Path, *, rounding: str = "f16", packages: Packages | None = None
    ) -> None:
        """Load an artifact; `packages` replace its own, if given. See `PackageOpener`.

        Raises ModelError if it is not a drafter, or a package cannot be loaded.
        """
        self.artifact, self.drafts = read_drafter(folder)
        opener = PackageOpener(self.artifact, units=DEFAULT_UNITS, rounding=rounding)
        self.packages = packages or opener.open_all(None)
        self._embeddings = np.load(folder / EMBEDDINGS, mmap_mode="r")
        self._rotary = np.load(folder / ROTARY)
        self.rows = self.artifact.rows // 2
        """Rows per block, including its first token."""

    def open(self, **_: Any) -> "DraftContext":
        return DraftContext(self)

    def inputs(
        self, tokens: Sequence[int], position: int, rows: Floats, span: tuple[int, int]
    ) -> dict[str, Floats]:
        """Return the inputs of a pass whose block begins with `tokens`, then masks, at `position`.

        `rows` are the context's new rows, [n, taps * hidden_size]. The block attends to the slots
        `span`, [first, end); new rows are the last of them.
        """
        block, slots, size = self.rows, self.artifact.slots, self.artifact.hidden_size
        start = span[1] - len(rows)
        masks = [self.drafts.mask_token] * (block - len(tokens))
        hidden = np.zeros((1, size * (1 + len(self.drafts.taps)), 2 * block, 1), np.float32)
        hidden[0, size:, : len(rows), 0] = rows.T
        hidden[0, :size, block:, 0] = self._embeddings[[*tokens, *masks]].T
        mask = np.full((1, 1, 2 * block, slots + block), HIDDEN, np.float32)
        mask[..., slice(*span)] = mask[..., slots:] = 0
        write = np.zeros((1, 1, slots + block, 2 * block), np.float32)
        new, own = np.arange(len(rows)), np.arange(block)
        write[0, 0, start + new, new] = write[0, 0, slots + own, block + own] = 1
        places = np.add.outer([start, position], own).clip(0, slots + block - 1)
        cos, sin = (table[places.ravel()] for table in self._rotary)
        return dict(zip(INPUTS, (hidden, cos, sin, mask, write), strict=True))


INPUTS = ("hidden", "rope_cos", "rope_sin", "attn_mask", "kv_write_mask")


class DraftContext:
    """The context of one sequence, up to the last known hidden state of the target."""

    def __init__(self, model: OpenDrafter) -> None:
        self._model = model
        self._states = [package.make_state() for package in model.packages.layers]
        self._first = self.length = 0
        self._new = np.zeros((0, 0), np.float32)
        """The last rows, whose keys and values are computed with the next block."""

    def inject(self, states: Floats, start: int) -> None:
        """Append rows [n, taps * hidden_size] that begin at `start`; after a gap, start over.

        Rows without a slot are dropped.
        """
        if start != self.length:
            self._first = self.length = start
            self._new = states[:0]
        states = states[: max(self._model.artifact.slots - start, 0)]
        self._new = np.concatenate([self._new, states]) if len(self._new) else states
        self.length += len(states)
        while len(self._new) > (block := self._model.rows):
            self._call((), 0, block)

    def run(
        self, tokens: Sequence[int], position: int, *, outputs: int, **_: Any
    ) -> tuple[Floats, Floats]:
        """Fill the block that begins with `tokens`; the first is at `position`.

        Returns the logits of its first rows, [outputs, vocab], and no hidden states.
        """
        stream = self._call(tokens, position, len(self._new))
        parts = [package.predict({"hidden": stream}) for package in self._model.packages.heads]
        rows = slice(self._model.rows, self._model.rows + outputs)
        logits = np.concatenate([part["logits"][0, :, rows, 0].T for part in parts], axis=1)
        return logits, logits[:0]

    def truncate(self, position: int) -> None:
        kept = max(position - self.length + len(self._new), 0)
        self._new, self.length = self._new[:kept], min(self.length, position)

    def copy(self, position: int) -> "DraftContext":
        """Return an empty context: Core ML's states cannot be copied."""
        del position
        return DraftContext(self._model)

    def _call(self, tokens: Sequence[int], position: int, count: int) -> Floats:
        """Run a pass with the first `count` new rows; return the stream after the last layer."""
        rows, self._new = self._new[:count], self._new[count:]
        end = self.length - len(self._new)
        inputs = self._model.inputs(tokens, position, rows, (self._first, end))
        for package, state in zip(self._model.packages.layers, self._states, strict=True):
            inputs["hidden"] = package.predict(inputs, state)["out_hidden"]
        return inputs["hidden"]


class _DFlash:
    """A `HeadKind`."""

    options: Mapping[str, Sequence[int]] = {}

    def is_inside(self, target: Path) -> bool:
        return False

    def taps(self, folder: Path, target: Path) -> tuple[int, ...]:
        artifact, drafts = read_drafter(folder)
        if is_core_ml(target):
            own = read_artifact(target)
            sizes = Sizes(own.family, own.layers, own.hidden_size, own.vocab_size)
        else:
            sizes, _ = sizes_of(target)
        check_fits(folder, _facts(artifact, drafts), sizes)
        return drafts.taps

    def open(self, folder: Path, engine: Any, options: Mapping[str, int]) -> BlockNetwork:
        if options:
            raise InvalidRequest(
                f"{folder} is for Core ML, which has no option {', '.join(options)}; remove it"
            )
        model = OpenDrafter(folder)
        facts, drafts = _facts(model.artifact, model.drafts), model.drafts
        sizes = facts.hidden_size, facts.vocab_size, model.rows
        file = DraftFile(folder, *facts[:2], drafts.taps, *sizes, drafts.mask_token)
        network = BlockNetwork(file, model)
        network.may_skip = True
        return network

    def facts(self, folder: Path) -> HeadFacts | None:
        artifact = read_artifact(folder) if is_core_ml(folder) else None
        drafts = artifact and artifact.drafts
        return _facts(artifact, drafts) if artifact and drafts else None


def _facts(artifact: Artifact, drafts: Drafts) -> HeadFacts:
    sizes = artifact.hidden_size, artifact.vocab_size, drafts.target_layers
    return HeadFacts("dflash", "DFlash", *sizes)


def read_drafter(folder: Path) -> tuple[Artifact, Drafts]:
    """Read a drafter's artifact. Raises ModelError if it is not a drafter, or corrupt."""
    artifact = read_artifact(folder) if is_core_ml(folder) else None
    if artifact is None or artifact.drafts is None:
        raise ModelError(
            f"{folder} has no Core ML drafter; expected a folder created by `paceline convert "
            "DRAFTER --to coreml --target MODEL`"
        )
    return artifact, artifact.drafts


DFLASH = _DFlash()
