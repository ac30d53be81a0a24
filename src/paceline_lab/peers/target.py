"""The model that all peers run, in the files that they read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.models import ModelFiles
from paceline.storage.system import cpu_cores
from paceline_lab.peers.base import Answer, NotComparable
from paceline_lab.peers.llama_server.binary import ServerBinary


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    """A model and the settings of every peer."""

    files: ModelFiles
    context: int
    """Tokens of the longest question and its answer."""
    say: Callable[[str], None]
    """Prints a note for the user."""
    threads: int | None = None
    """None: the runtime's default."""
    draft: ModelFiles | None = None
    """A smaller model, for runtimes that draft with one."""
    llama_server: ServerBinary | None = None
    """None: the one on PATH."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer."""
        return self.files.stop_token_ids

    @property
    def cores(self) -> int:
        """CPU threads: `threads`, or one per core that this process may use."""
        return cpu_cores() if self.threads is None else self.threads

    @property
    def gguf(self) -> Path:
        """The GGUF file. Raises NotComparable if there is none."""
        if self.files.weights is None:
            raise NotComparable(f"{self.files.name} is no GGUF file; expected one")
        return self.files.weights

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
