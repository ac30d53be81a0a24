"""A loaded model, as Python programs use it: answers, one or many at a time, chats and embeddings.

A single answer runs in the caller's thread; lists of prompts and coroutines share the calls of a
thread (`batching/`). Invariant: neither way, nor who else asks, changes a token of an answer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from paceline import drafters as drafting
from paceline.decoding.types import FINAL_NORM
from paceline.drafters import AnswerHistory, DrafterSpec
from paceline.errors import InvalidRequest
from paceline.models import Pooling
from paceline.options import Options
from paceline.runtime.chat import Message
from paceline.runtime.conversation import Conversation
from paceline.runtime.core import ModelCore
from paceline.runtime.pooled import NO_EMBEDDINGS, Embedding
from paceline.runtime.prompt import Prompt, Prompts, batch_of, check_ids
from paceline.runtime.request import check
from paceline.runtime.result import Result
from paceline.runtime.stream import Stream
from paceline.storage.processes import in_forked_child

if TYPE_CHECKING:
    from paceline.runtime.batching.batches import AsyncStream, Batches
    from paceline.runtime.batching.request import BatchRequest, Listener, QueuedRequest


class Model(ModelCore):
    """A model in memory, for any number of threads; a `with` block frees it at its end.

    Answers of `generate` in several threads run one after another, and those of lists and of
    coroutines together. Streams and conversations may be interleaved; a step waits for its turn.
    """

    _batches: "Batches | None" = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.engine.context_length} tokens of context"
        return f"<Model {self.files.name} on {self.files.engine}: {state}>"

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    def generate(
        self, prompt: Prompt | Prompts, **options: Unpack[Options]
    ) -> Result | list[Result]:
        """Return the whole answer, or those to a list of prompts, which run together.

        `Options` has what can be set; it is that of every prompt. An answer that reaches the end of
        the context or of the KV cache ends with `length`.

        Raises:
            InvalidRequest: a prompt or an option cannot be served.
            CacheFull: other streams and conversations leave no KV slots for a prompt.

        """
        prompts = batch_of(prompt)
        if prompts is None:
            with self.lock:
                if not self._batching:
                    for _ in (stream := self.stream(cast("Prompt", prompt), **options)):
                        pass
                    return stream.result
        if prompts is None:
            request = self._batch_request(cast("Prompt", prompt), options)
            ((_, result),) = self._as_they_end(iter([request]), noun=None)
            return result
        requests = [*self._requests(prompts, options)]  # a wrong one is refused before any runs
        results = sorted(self._as_they_end(iter(requests)), key=itemgetter(0))
        return [result for _, result in results]

    def map(
        self, prompts: Iterable[Prompt], **options: Unpack[Options]
    ) -> Iterator[tuple[int, Result]]:
        """Answer prompts together; yield the number of each, from 0, and its result, as it ends.

        Prompts are read as places become free, so there may be any number of them. Raises as
        `generate` does; an error of one ends all.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidRequest("map answers several prompts, and this is one; use generate")
        self.request(options)  # refused now, and not when the first answer is asked for
        return self._as_they_end(self._requests(prompts, options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Return a stream: iterate for steps, then read `.result`. Raises as `generate` does."""
        started = perf_counter()
        request = self.request(options)
        tokens, request = self.encode_prompt(prompt, request)
        with self.lock:
            self.ensure_taps(request)
            request = request.fitted(
                len(tokens), context=self.engine.context_length, free=self.engine.free_slots
            )
            sequence = self.open_sequence()
            try:
                return self.open_stream(
                    tokens, request, sequence, started, end=lambda _: self.close_sequence(sequence)
                )
            except BaseException:
                self.close_sequence(sequence)
                raise

    @overload
    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    async def agenerate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    async def agenerate(
        self, prompt: Prompt | Prompts, **options: Unpack[Options]
    ) -> Result | list[Result]:
        """Do as `generate` in a coroutine: answers of several run together."""
        prompts = batch_of(prompt)
        if prompts is None:
            return await self.astream(cast("Prompt", prompt), **options).finish()
        import asyncio

        from paceline.runtime.batching.batches import AsyncStream

        requests = await asyncio.to_thread(lambda: [*self._requests(prompts, options)])
        submit = self._running_batches.submit
        streams = [AsyncStream(partial(submit, request)) for request in requests]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(stream.finish()) for stream in streams]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer.result() for answer in answers]

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> "AsyncStream":
        """Return a stream for a coroutine: `async for` steps, then read `.result`."""
        from paceline.runtime.batching.batches import AsyncStream

        def submit(listener: "Listener") -> "QueuedRequest":
            request = self._batch_request(prompt, options)
            return self._running_batches.submit(request, listener)

        return AsyncStream(submit)

    @overload
    def embed(self, text: str) -> npt.NDArray[np.float32]: ...

    @overload
    def embed(self, text: Sequence[str]) -> npt.NDArray[np.float32]: ...

    def embed(self, text: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the vector of a text, [d] of length 1, or those of several texts, [texts, d].

        Raises:
            InvalidRequest: the model makes no embeddings, or a text is empty or too long.
        """
        texts = [text] if isinstance(text, str) else [*text]
        kinds = ["nothing" if one == "" else type(one).__name__ for one in texts]
        for number, kind in enumerate(kinds):
            if kind != "str":
                raise InvalidRequest(f"text {number} is {kind}; expected a string with characters")
        if not texts:
            raise InvalidRequest("there is no text; expected a string, or several")
        with self.lock:
            self._check_pooling()
            self._ensure_taps({FINAL_NORM}, "embed")
        encode = self.files.tokenizer().encode
        requests = [self.embedding_request(encode(one, special=True)) for one in texts]
        pairs = self._running_batches.as_they_end(iter(requests), "text")
        results = sorted(pairs, key=itemgetter(0))
        vectors = np.stack([cast("Embedding", result).vector for _, result in results])
        return vectors[0] if isinstance(text, str) else vectors

    def embedding_request(self, tokens: Sequence[int]) -> "BatchRequest":
        """Return the request for a text's vector. Raises InvalidRequest if there can be none."""
        from paceline.runtime.batching.request import BatchRequest

        end = self.files.facts.pooled_end
        ended = [] if end is None or (tokens and tokens[-1] == end) else [end]
        return BatchRequest(
            [*tokens, *ended],
            self.request({"max_tokens": 1, "drafter": "none"}),
            cached=False,
            pooling=self._check_pooling(),
        )

    def conversation(self, messages: Sequence[Message] = ()) -> Conversation:
        """Return a chat that keeps the KV of its earlier turns; see `Conversation`."""
        return Conversation(self, messages)

    def tokens(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the prompt as token ids.

        Raises:
            InvalidRequest: an empty prompt, or messages that the chat template refuses.
            ModelError: the model has no chat template and the prompt needs one.

        """
        return self.encode_prompt(prompt, check({"raw": raw}))[0]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without control tokens.

        Raises InvalidRequest for ids that are not in the vocabulary.
        """
        check_ids("detokenize", token_ids, self.engine.vocab_size)
        return self.files.tokenizer().decode(token_ids)

    def open_drafters(self, drafter: str) -> None:
        """Read and compile what `drafter` needs, so that no request waits for it.

        Raises:
            InvalidRequest: there is no such drafter for this model.
            ModelError: it cannot be read, or does not fit the model.
        """
        spec = DrafterSpec.parse(drafter).resolve(self._shared.shipped)
        for opened in drafting.create(spec, self._shared):
            opened.close()

    def settle(self) -> None:
        """Wait for what runs in the background after answers: the counting of kept ones."""
        if self._kept is not None:
            self._kept.settle()

    def fresh(self) -> "Model":
        """Return another on the same engine, with the same drafters open and nothing learned."""
        other = Model(self.files, self.engine, defaults=self.defaults, progress=self._progress)
        other.lock = self.lock
        other._shared = replace(self._shared, history=AnswerHistory())
        other.costs, other._exactness = self.costs, self._exactness
        return other

    def close(self) -> None:
        """End all answers and free the engine; what is asked of the model later is refused.

        Models of `fresh` have the same engine. Further calls do nothing, nor one in a forked child.
        """
        if in_forked_child():
            return
        if self._batches is not None:
            self._batches.close()
        with self.lock:
            if not self._closed:
                self._free()

    @property
    def _batching(self) -> bool:
        """Whether answers of a batch run or wait."""
        return self._batches is not None and self._batches.busy

    @property
    def _in_use(self) -> bool:
        return super()._in_use or self._batching

    @property
    def _running_batches(self) -> "Batches":
        from paceline.runtime.batching.batches import Batches

        with self.lock:
            if self._batches is None:
                self._batches = Batches(self)
            return self._batches

    def _requests(self, prompts: Iterable[Prompt], options: Options) -> Iterator["BatchRequest"]:
        """Return a request for each prompt. Raises InvalidRequest, which names a wrong prompt."""
        self.request(options)  # a wrong option is no fault of the first prompt
        for number, prompt in enumerate(prompts):
            try:
                yield self._batch_request(prompt, options)
            except InvalidRequest as error:
                raise InvalidRequest(f"prompt {number}: {error}") from error

    def _batch_request(self, prompt: Prompt, options: Options) -> "BatchRequest":
        from paceline.runtime.batching.request import BatchRequest

        tokens, request = self.encode_prompt(prompt, self.request(options))
        with self.lock:
            self.ensure_taps(request)
        return BatchRequest(tokens, request)

    def _as_they_end(
        self, requests: Iterator["BatchRequest"], noun: str | None = "prompt"
    ) -> Iterator[tuple[int, Result]]:
        """Run requests together; see `Batches.as_they_end`."""
        for number, result in self._running_batches.as_they_end(requests, noun):
            assert isinstance(result, Result)
            yield number, result

    def _check_pooling(self) -> Pooling:
        """Return how a text's hidden states are pooled. Raises InvalidRequest if in no way."""
        pooling = self.files.facts.pooling
        if pooling is None:
            raise InvalidRequest(f"{self.files.name} {NO_EMBEDDINGS}")
        return pooling
