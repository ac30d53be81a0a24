"""Records the target's hidden states for every token of the answers, on disk.

One file of float16 rows, in the order of the answers; a stopped run continues after the last
complete text.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.decoding.types import Block, tap_name
from paceline.engines.base import Engine
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.files import digest_of, read_json, write_json, writing
from paceline_lab.train.answers import Answer

Array = npt.NDArray[np.float32]

ROWS = "features.f16"
ABOUT = "features.json"

_CHUNK = 512
"""Tokens of a prefill call."""


class HiddenStates:
    """Hidden states of texts, mapped from disk."""

    def __init__(self, path: Path, lengths: Sequence[int], width: int) -> None:
        """`width` has the values of a row: taps * d."""
        self._rows = np.memmap(path, np.float16, "r", shape=(sum(lengths), width))
        self._ends = list(accumulate(lengths, initial=0))

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._ends) - 1

    def of(self, text: int) -> npt.NDArray[np.float16]:
        """[tokens, taps * d] of text number `text`."""
        return self._rows[self._ends[text] : self._ends[text + 1]]


def record_hidden_states(
    engine: Engine,
    answers: Sequence[Answer],
    folder: Path,
    *,
    fingerprint: str,
    progress: Progress,
    read: Callable[[Array], Array] = np.asarray,
    stop: Callable[[], bool] = lambda: False,
) -> HiddenStates:
    """Prefill prompts and answers, and record the tapped hidden states.

    Args:
        engine: the target, opened with the taps to record.
        answers: the texts.
        folder: to write to; recorded texts are not computed again.
        fingerprint: identity of the target's weights.
        progress: reports tokens.
        read: makes of states [n, taps * d] what is recorded, [n, width].
        stop: called before each text but the first; True: the texts so far are all.

    Raises:
        InvalidRequest: the folder is for other texts, taps or weights, or cannot be written.
    """
    about: dict[str, Any] = {
        "fingerprint": fingerprint,
        "taps": list(engine.taps),
        "texts": len(answers),
        "tokens": digest_of([answer.tokens for answer in answers]),
    }
    path = folder / ROWS
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ABOUT).exists():
            path.unlink(missing_ok=True)
            write_json(folder / ABOUT, about)
        if read_json(folder / ABOUT) != about:
            raise InvalidRequest(
                f"{folder} has hidden states of other answers, taps or weights; remove it, or "
                "choose another folder"
            )
        return _fill(_Recorder(engine, read), answers, path, progress=progress, stop=stop)


def _fill(
    record: "_Recorder",
    answers: Sequence[Answer],
    path: Path,
    *,
    progress: Progress,
    stop: Callable[[], bool],
) -> HiddenStates:
    lengths = [len(answer.tokens) for answer in answers]
    ends = list(accumulate(lengths, initial=0))
    width = record(answers[0].tokens).shape[1]
    with path.open("ab") as file, progress.task("hidden states", ends[-1], unit="tokens") as update:
        whole = file.tell() // (2 * width)
        done = max(at for at, end in enumerate(ends) if end <= whole)
        file.truncate(ends[done] * width * 2)
        update(ends[done])
        while done < len(answers) and not (done and stop()):
            file.write(record(answers[done].tokens).tobytes())
            done += 1
            update(ends[done])
    return HiddenStates(path, lengths[:done], width)


class _Recorder(NamedTuple):
    """Computes the rows of a text."""

    engine: Engine
    read: Callable[[Array], Array]

    def __call__(self, tokens: Sequence[int]) -> npt.NDArray[np.float16]:
        """[tokens, width], the taps in the engine's order."""
        engine = self.engine
        parts = []
        with closing(engine.open()) as sequence:
            for at in range(0, len(tokens), _CHUNK):
                part = tokens[at : at + _CHUNK]
                taps = engine.step([(sequence, Block(part, 0, prefill=True))]).taps[0]
                rows = np.concatenate([taps[tap_name(layer)] for layer in engine.taps], axis=1)
                parts.append(self.read(rows).astype(np.float16))
                sequence.commit(len(part))
        return np.concatenate(parts)
