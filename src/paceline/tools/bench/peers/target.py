"""The model that all answer, in the form that each runtime wants it.

The rule: it is one model. A GGUF file is the one that paceline's own form was made from, and the
Hugging Face form is transformers' reading of that file.
"""

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from paceline.errors import MissingExtra
from paceline.models import ModelFiles, Origin, Progress, open_origin
from paceline.tools.bench.peers.base import Answer, NotComparable

_MAKES_CHECKPOINTS = ("torch", "transformers", "accelerate", "gguf")


class Target(contextlib.ExitStack):
    """A model's forms, made when they are asked for; gone at the end of the `with` block."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        context: int,
        progress: Progress,
        threads: int | None = None,
        draft: str | None = None,
    ) -> None:
        """The model that `files` has paceline's form of.

        Args:
            files: paceline's form.
            context: slots that the longest question and its answer need.
            progress: told about long work.
            threads: CPU threads; None leaves it to each runtime.
            draft: the name of a smaller model, for runtimes that draft with one.
        """
        super().__init__()
        self.files = files
        self.context = context
        self.threads = threads
        self.draft = draft
        self._progress = progress

    def __enter__(self) -> Self:
        """Make a folder for what has to be fetched or written."""
        self._work = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        return self

    @property
    def stops(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return self.files.stop_token_ids

    @property
    def cores(self) -> int:
        """The threads that were asked for, or one for each core that this process may use."""
        if self.threads is not None:
            return self.threads
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    @cached_property
    def gguf(self) -> Path:
        """The GGUF file. Raises ModelError where there is none, or it cannot be fetched."""
        weights = self._origin.weights
        if not weights.is_file():
            raise NotComparable(f"{self.files.name} was not made from a GGUF file")
        return weights

    @cached_property
    def checkpoint(self) -> Path:
        """The folder with the Hugging Face form: config and weights.

        Raises:
            MissingExtra: what writes it from a GGUF file is not installed.
            ModelError: there is none, and none can be made.
        """
        if self.files.engine == "mlx":  # paceline's own form is one
            return self.files.folder
        return self._as_checkpoint(self._origin)

    @cached_property
    def draft_checkpoint(self) -> Path | None:
        """The same of the smaller model, where there is one."""
        return None if self.draft is None else self._as_checkpoint(self._open(self.draft))

    def answered(
        self, tokens: Sequence[int], first: float, decode: float, *, at_first: int = 1
    ) -> Answer:
        """An answer from the tokens that a runtime gave; `first` and `decode` are seconds."""
        kept = list(tokens)
        while kept and kept[-1] in self.stops:
            kept.pop()
        text = self.files.tokenizer().decode(kept)
        return Answer(text, kept, len(tokens), first, decode, at_first)

    @cached_property
    def _origin(self) -> Origin:
        name = self.files.name
        if not Path(name).exists():
            name = name.partition("@")[0]  # what stands behind says which form of it
        return self._open(name)

    def _open(self, name: str) -> Origin:
        return open_origin(name, Path(tempfile.mkdtemp(dir=self._work)), self._progress)

    def _as_checkpoint(self, origin: Origin) -> Path:
        if origin.weights.is_dir():
            return origin.weights
        missing = [name for name in _MAKES_CHECKPOINTS if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingExtra(
                f"the Hugging Face form of {origin.name} is made from its GGUF file with "
                f"{', '.join(missing)}: pip install {' '.join(missing)}"
            )
        from paceline.tools.coreml.source import open_source

        source = open_source(str(origin.weights), self._work, self._progress)
        return self.enter_context(source).checkpoint
