"""A chat of several turns: its messages. The prefix cache holds the KV of earlier turns.

Invariant: a turn that fails, in whatever way, leaves the messages as they were.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Unpack
from weakref import ref

from paceline.errors import ContextFull, InvalidRequest
from paceline.options import Options
from paceline.runtime.prompt import SYSTEM_ROLES, Message
from paceline.runtime.renamed import renamed
from paceline.runtime.request import Request
from paceline.runtime.result import Result

if TYPE_CHECKING:
    from paceline import Model
    from paceline.runtime.stream import Stream

_ANSWER_SHARE = 4
"""The reciprocal of the context's share that is left for the answer when turns are dropped."""


class Conversation:
    """A chat; only the new tokens of a turn are computed.

    Use it in one thread; finish or close a turn's stream before the next.
    """

    def __init__(self, model: "Model", messages: Sequence[Message] = ()) -> None:
        """Begin with `messages`: a system message, or the turns of an earlier chat."""
        self.messages: list[Message] = list(messages)  # may be edited between turns
        self.model = model
        self._answering: ref[Stream] | None = None

    def __repr__(self) -> str:
        return f"<Conversation with {self.model.files.name}: {self.turns} turns>"

    @property
    def context(self) -> int:
        """The maximum tokens of all turns: the context length, or fewer in a small KV cache."""
        return self.model.max_length

    @property
    def turns(self) -> int:
        """The number of turns: a turn is a user's message, and all before the next one."""
        return max((turn for turn, _ in _by_turn(self.messages)), default=0)

    def send(self, text: str, **options: Unpack[Options]) -> "Stream":
        """Answer one more message; both are added to `messages` when the answer has ended.

        An answer that fills the context ends with `length`. A stream that is closed before its
        first token adds nothing.

        Raises:
            ContextFull: the chat and the message leave no room for an answer; see `drop_oldest`.
            InvalidRequest: the message or an option cannot be served, or the last answer has not
                ended.
            ModelError: the chat template fails, or a drafter cannot be read.
        """
        from paceline.runtime.stream import Stream

        if not text:
            raise InvalidRequest("the message is empty; expected some text")
        self._check_ended()
        user: Message = {"role": "user", "content": text}
        turns = [*self.messages, user]
        request = self.model._batch_request(turns, options)
        if len(request.tokens) >= self.context:
            raise self._full(user, request.request, len(request.tokens))

        def end(result: Result) -> None:
            self._answering = None
            if result.token_ids:
                thoughts = self.model.files.thinking.message_fields(result.reasoning)
                self.messages = [*turns, {"role": "assistant", "content": result.text, **thoughts}]

        stream = Stream(request, self.model._submit, end)
        self._answering = ref(stream)
        return stream

    say = renamed("say", send)

    def drop_oldest(self, turns: int = 1) -> list[Message]:
        """Drop the oldest turns, each whole, but no system message; return the dropped messages.

        Raises InvalidRequest if there are fewer turns, or the last answer has not ended.
        """
        self._check_ended()
        if not 0 <= turns <= self.turns:
            raise InvalidRequest(f"cannot drop {turns} turns; the chat has {self.turns}")
        dropped, self.messages = _split(self.messages, turns)
        return dropped

    def close(self) -> None:
        """End the current answer, if any."""
        if self._answering is not None and (stream := self._answering()) is not None:
            stream.close()

    def _check_ended(self) -> None:
        stream = None if self._answering is None else self._answering()
        if stream is not None and not stream.finished:
            raise InvalidRequest(
                "the last answer has not ended: read it to its end, or close its stream"
            )

    def _full(self, user: Message, request: Request, count: int) -> ContextFull:
        """Return the error for a message that does not fit, with the number of turns to drop."""
        context = self.context

        def length(turns: int) -> int:
            messages = [*_split(self.messages, turns)[1], user]
            return len(self.model._encode_prompt(messages, request)[0])

        room = max(min(request.max_tokens or context, context // _ANSWER_SHARE), 1)
        enough = (drop for drop in range(self.turns) if length(drop) <= context - room)
        turns = next(enough, self.turns)  # a short answer is better than none
        fits = length(turns) < context
        advice = "the message is too long even without the earlier turns; shorten it"
        if fits:
            advice = f"shorten the message, or drop the oldest {turns} of {self.turns} turns"
        return ContextFull(
            f"the conversation and the new message have {count} tokens, and the context holds "
            f"{context}, the answer included; {advice}",
            tokens=count,
            context=context,
            turns=turns if fits else None,
        )


def _by_turn(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Yield the number of each message's turn, from 1, and the message; system messages have 0."""
    turns = 0
    for message in messages:
        is_system = message.get("role") in SYSTEM_ROLES
        if not is_system and (message.get("role") == "user" or not turns):
            turns += 1
        yield (0 if is_system else turns), message


def _split(messages: Sequence[Message], count: int) -> tuple[list[Message], list[Message]]:
    """Divide messages into those of the oldest `count` turns, and all others in their order."""
    pairs = [*_by_turn(messages)]
    dropped = [message for turn, message in pairs if 0 < turn <= count]
    return dropped, [message for turn, message in pairs if not 0 < turn <= count]
