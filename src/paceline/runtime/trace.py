"""Writes a trace: what happened in each step of an answer, as a file of JSON lines.

The first line has the request and the model, each further line a step, the last line the result.
Without a result the answer was broken off; the steps are valid.

Invariant: a whole line is in the file before its step is passed on.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import paceline
from paceline.decoding.types import Step
from paceline.storage.files import writing

if TYPE_CHECKING:
    from paceline.runtime.model import Model
    from paceline.runtime.stream import Stream

FORM = "paceline-trace"
VERSION = 1

_SECONDS = {
    "draft": "draft_seconds",
    "verify": "verify_seconds",
    "sample": "sample_seconds",
    "whole": "decode_seconds",
}
"""Part of a step's time -> the field of `Stats` that it adds to."""


class Trace:
    """Writes the trace of one answer.

    >>> with model.stream(prompt) as stream, Trace(path, model, stream) as steps:
    ...     for step in steps:
    ...         print(step.text, end="")
    """

    def __init__(
        self,
        path: Path,
        model: "Model",
        stream: "Stream",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a file for a stream of which nothing was read, and overwrite one that is there.

        `settings` are the options; those that JSON cannot represent are left out. Raises
        InvalidRequest if the file cannot be written.
        """
        self._path, self._stream = path, stream
        self._decode = model.files.tokenizer().continuation
        with writing(path):
            self._file = path.open("w", encoding="utf-8")
        asked = {name: value for name, value in (settings or {}).items() if _is_json(value)}
        self._append(
            {
                "form": FORM,
                "version": VERSION,
                "made": datetime.now(UTC).isoformat(timespec="seconds"),
                "paceline": paceline.__version__,
                "model": model.files.name,
                "fingerprint": model.files.fingerprint,
                "engine": model.engine.describe(),
                "settings": asked,
                "cached": stream.sequence.length,
                "prompt_token_ids": stream.tokens,
            }
        )

    def __iter__(self) -> Iterator[Step]:
        """Yield the stream's steps, each after it was written."""
        stats, before = self._stream.stats, dict.fromkeys(_SECONDS, 0.0)
        for number, step in enumerate(self._stream):
            pieces = [piece.reasoning + piece.final for piece in step.pieces]
            line: dict[str, Any] = {"tokens": [*step.tokens], "pieces": pieces}
            if number == 0:
                self._append({**line, "prefill_seconds": stats.prefill_seconds})
                yield step
                continue
            now = {part: getattr(stats, field) for part, field in _SECONDS.items()}
            took = {part: now[part] - before[part] for part in now}
            before, proposal = now, step.proposal
            self._append(
                {
                    "context": len(self._stream.tokens) - len(step.tokens) - 1,
                    "rows": len(proposal.tokens) + 1,
                    "source": proposal.source,
                    "match": proposal.match,
                    "chances": [round(chance, 4) for chance in proposal.probabilities],
                    "proposed": [*proposal.tokens],
                    "guess": self._decode(proposal.tokens),
                    "stood": step.matched,
                    **line,
                    "seconds": took,
                }
            )
            yield step

    def close(self) -> None:
        """End the answer and write its result. Further calls do nothing."""
        if self._file.closed:
            return
        self._stream.close()
        try:
            if not self._stream.failed:
                self._append({"result": self._stream.result.as_dict()})
        finally:
            with writing(self._path):
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: Mapping[str, Any]) -> None:
        with writing(self._path):
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()


def _is_json(value: object) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
