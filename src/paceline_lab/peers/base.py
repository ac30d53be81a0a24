"""The protocol of a peer: a runtime that answers questions greedily, in one or more modes.

Invariant: all peers get the same question and token limit, reuse nothing of earlier answers, and
have times measured by the runtime itself or by its client.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline.storage.system import cpu_cores

if TYPE_CHECKING:
    from paceline_lab.peers.llama_server.binary import ServerBinary


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, as messages and as token ids: a peer gets what it takes."""

    id: str
    kind: str
    messages: Sequence[dict[str, Any]]
    tokens: Sequence[int]
    """The messages in the model's chat template, encoded."""


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    text: str
    tokens: Sequence[int] | None
    """Without the stop token; None from a peer that returns text only."""
    count: int
    """Tokens, the stop token included."""
    first_token_seconds: float
    """From the request to the first token and those accepted with it."""
    decode_seconds: float
    """From the first token to the end."""
    seconds: float | None = None
    """The whole answer, as the client of a server measures it; None: the two parts are all."""
    draft: tuple[int, int] | None = None
    """Draft tokens, and how many of them were accepted; None from a peer that does not say."""

    @property
    def whole_rate(self) -> float:
        """Throughput of the whole answer, prompt included, in answer tokens/s."""
        seconds = self.first_token_seconds + self.decode_seconds
        return self.count / (self.seconds or seconds)

    @property
    def rate(self) -> float | None:
        """Decode throughput, tokens/s after the first token; None if there are no such tokens."""
        after = self.count - 1
        return after / self.decode_seconds if after > 0 and self.decode_seconds > 0 else None

    def same(self, other: "PeerAnswer") -> bool:
        """True if both are equal: by tokens if both have them, else by text."""
        if self.tokens is None or other.tokens is None:
            return self.text == other.text
        return list(self.tokens) == list(other.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    files: ModelFiles
    context: int
    """Tokens of the longest question and its answer."""
    say: Callable[[str], None]
    """Prints a note for the user."""
    threads: int | None = None
    """None: the runtime's default."""
    llama_server: "ServerBinary | None" = None
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
        """The GGUF file. Raises ModelError if there is none."""
        if self.files.weights is None:
            raise ModelError(f"{self.files.name} is no GGUF file; expected one")
        return self.files.weights

    def answered(
        self,
        tokens: Sequence[int],
        first: float,
        decode: float,
        *,
        seconds: float | None = None,
        draft: tuple[int, int] | None = None,
    ) -> PeerAnswer:
        """An answer from a runtime's tokens; `first` and `decode` are seconds, see `PeerAnswer`."""
        answer = list(tokens)
        while answer and answer[-1] in self.stops:
            answer.pop()
        text = self.files.tokenizer().continuation(answer)
        return PeerAnswer(text, answer, len(tokens), first, decode, seconds, draft)


class Peer(Protocol):
    """A runtime with a model loaded."""

    name: str
    """In results."""
    packages: Sequence[str]
    """Packages whose versions a result has."""
    settings: Mapping[str, Any]
    """Settings of the runtime, as JSON for the record."""
    modes: Sequence[str]
    """Decoding modes; the first is its plain decoding, if requests can choose that."""

    def answer(self, question: Question, max_tokens: int, mode: str) -> PeerAnswer:
        """Answer greedily in one of the modes. Raises any error of the runtime."""
        ...
