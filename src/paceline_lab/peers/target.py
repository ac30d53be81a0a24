"""The model that all peers run, in the formats that they need.

Invariant: all formats are one model. The GGUF file is the one that paceline's form was made from,
and the Hugging Face checkpoint is transformers' conversion of that file.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

from paceline.errors import MissingExtra
from paceline.models import ModelFiles, Origin, Progress, checkpoint_from_gguf, open_origin
from paceline.storage.system import cpu_cores
from paceline_lab.peers.base import Answer, NotComparable
from paceline_lab.peers.llama_server.binary import ServerBinary

_MAKES_CHECKPOINTS = ("torch", "transformers", "accelerate", "gguf")


class TargetModel(contextlib.ExitStack):
    """A model's formats, created on first use and deleted at the end of the `with` block."""

    def __init__(
        self,
        files: ModelFiles,
        *,
        context: int,
        progress: Progress,
        threads: int | None = None,
        draft: str | None = None,
        llama_server: ServerBinary | None = None,
    ) -> None:
        """Use the model of `files`.

        `context` is the tokens of the longest question and its answer; `threads` is the CPU threads
        (None: the runtime's default), `draft` a smaller model for runtimes that draft with one,
        `llama_server` the program of that peer (None: the one on PATH).
        """
        super().__init__()
        self.files = files
        self.context = context
        self.threads = threads
        self.draft = draft
        self.llama_server = llama_server
        self._progress = progress

    def __enter__(self) -> Self:
        """Make a temporary folder for downloads and conversions."""
        self._work = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        return self

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer."""
        return self.files.stop_token_ids

    @property
    def cores(self) -> int:
        """CPU threads: `threads`, or one per core that this process may use."""
        return cpu_cores() if self.threads is None else self.threads

    @cached_property
    def gguf(self) -> Path:
        """The GGUF file. Raises ModelError if there is none, or it cannot be fetched."""
        weights = self._origin.weights
        if not weights.is_file():
            raise NotComparable(f"{self.files.name} was not made from a GGUF file")
        return weights

    @cached_property
    def checkpoint(self) -> Path:
        """The folder with the Hugging Face checkpoint: config and weights.

        Raises:
            MissingExtra: a package that converts the GGUF file is not installed.
            ModelError: there is no checkpoint, and none can be converted.
        """
        if self.files.engine == "mlx":  # paceline runs the checkpoint itself
            return self.files.folder
        return self._as_checkpoint(self._origin)

    @cached_property
    def draft_checkpoint(self) -> Path | None:
        """The checkpoint of the draft model, if there is one."""
        return None if self.draft is None else self._as_checkpoint(self._open(self.draft))

    def say(self, line: str) -> None:
        """Print a note for the user."""
        self._progress.say(line)

    def answered(
        self,
        tokens: Sequence[int],
        first: float,
        decode: float,
        *,
        at_first: int = 1,
        seconds: float | None = None,
        draft: tuple[int, int] | None = None,
    ) -> Answer:
        """An answer from a runtime's tokens; `first` and `decode` are seconds, see `Answer`."""
        answer = list(tokens)
        while answer and answer[-1] in self.stops:
            answer.pop()
        text = self.files.tokenizer().continuation(answer)
        return Answer(text, answer, len(tokens), first, decode, at_first, seconds, draft)

    @cached_property
    def _origin(self) -> Origin:
        name = self.files.name
        if not Path(name).exists():
            name = name.partition("@")[0]  # @FORM selects one of paceline's forms
        return self._open(name)

    def _open(self, name: str) -> Origin:
        return open_origin(name, Path(tempfile.mkdtemp(dir=self._work)), self._progress)

    def _as_checkpoint(self, origin: Origin) -> Path:
        if origin.weights.is_dir():
            return origin.weights
        missing = [name for name in _MAKES_CHECKPOINTS if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingExtra(
                f"converting the GGUF file of {origin.name} to a Hugging Face checkpoint needs "
                f"{', '.join(missing)}: pip install {' '.join(missing)}"
            )
        checkpoint = Path(tempfile.mkdtemp(dir=self._work)) / "checkpoint"
        with self._progress.task(f"reading the weights of {origin.weights.name}"):
            checkpoint_from_gguf(origin.weights, checkpoint)
        return checkpoint
