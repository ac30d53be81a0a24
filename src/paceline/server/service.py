"""The served model, and the conversion of bodies to scheduler requests.

Independent of HTTP and of response formats. Invariants: no client string is used as a file name;
short bodies wait neither for long ones nor for grammars.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from enum import Enum
from http import HTTPStatus
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple, TypeVar, cast

from paceline.constraints.call_grammar import literal
from paceline.constraints.grammar import Grammars
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.text import SIGN
from paceline.decoding.types import FINAL_NORM, Constraint
from paceline.drafters import DrafterSpec
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.batching.request import BatchRequest, Draining
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.embedding import NO_EMBEDDINGS
from paceline.runtime.model import Model
from paceline.runtime.request import structure
from paceline.server.body import (
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    GenerationBody,
    Prediction,
)
from paceline.server.errors import ApiError, field_error, unknown_model
from paceline.server.json_body import AllowedTools, NamedTool
from paceline.server.metrics import Metrics
from paceline.server.prompts import Prompts
from paceline.server.response_store import ResponseStore
from paceline.server.settings import Settings
from paceline.tools.forms import ToolForm

_T = TypeVar("_T")

_SAFE_DRAFTERS = ("suffix", "table", "prediction")
"""Drafters that any request may name, as well as `ngram` with options. None of them opens a file
that the server was not started with."""

_TEMPERATURE = 1.0
"""OpenAI's default, if neither the request nor the registry nor the model has one."""

_MAX_TOKENS = 16_384
"""Token limit of an answer without one: more than agents write at once, and an end to noise."""

_SHORT_BYTES = 16 * 1024

_GRAMMARS = 256
"""Threads for grammars, enough that compiled ones never wait for others."""


class Lane(Enum):
    """A kind of work that waits only for its own kind; the value is the number of threads."""

    # One thread: tokenizing a megabyte of text takes 100 MB, which a thread keeps. With eight
    # threads and such bodies the server permanently grew by 720 MB.
    LONG = "long", 1
    SHORT = "short", 1
    GRAMMAR = "grammar", _GRAMMARS

    @classmethod
    def for_body(cls, body: bytes) -> "Lane":
        """Return the lane that parses a body, and renders and tokenizes its prompt."""
        return cls.LONG if len(body) > _SHORT_BYTES else cls.SHORT


class Readers:
    """The threads of one server. Thread-safe."""

    def __init__(self) -> None:
        self._pools = {
            lane: ThreadPoolExecutor(lane.value[1], f"paceline-{lane.value[0]}-reader")
            for lane in Lane
        }
        self._started: dict[int, float] = {}  # thread -> time when its work began

    async def run(self, lane: Lane, work: Callable[..., _T], *args: Any) -> _T:
        """Run in a thread of a lane; waiting work is dropped with its caller.

        Raises Draining after `close`.
        """
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(self._pools[lane], self._timed, work, *args)
        except RuntimeError:  # the threads have ended
            raise Draining("the server is shutting down and accepts no more requests") from None
        return await future

    @property
    def busy_seconds(self) -> float:
        """Duration so far of the longest work in progress, in seconds."""
        now = monotonic()
        return now - min(self._started.copy().values(), default=now)

    def close(self) -> None:
        """Wait for the work in progress, and drop the rest."""
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _timed(self, work: Callable[..., _T], *args: Any) -> _T:
        self._started[get_ident()] = monotonic()
        try:
            return work(*args)
        finally:
            del self._started[get_ident()]


class Service:
    """One model for many clients. Its methods are thread-safe."""

    def __init__(self, model: Model, scheduler: Scheduler, settings: Settings) -> None:
        """Serve a model with its scheduler; raise as `Prompts` does."""
        files = model.files
        self.model, self.scheduler = model, scheduler
        self.settings = settings
        self.readers = Readers()
        limit = min(_MAX_TOKENS, self.max_length // 2)
        fallback = {"temperature": _TEMPERATURE, "max_tokens": limit}
        self.defaults = replace(model.defaults, fallback=fallback)
        max_tokens = settings.default_max_tokens
        self.limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        self.tokenizer = files.tokenizer
        self.name = settings.name or files.short_name
        self.prompts = Prompts(model, self.name, settings, self.max_length)
        self.token_bytes = self.prompts.token_bytes
        self.created = self.now()
        self.fingerprint = f"fp_{files.fingerprint[:12]}"
        self.metrics = Metrics(scheduler, self.name, self.fingerprint)
        self.on_error = self.metrics.on_error
        self.grammars = model._grammars
        self.stored = ResponseStore()

    def close(self, grace: float) -> None:
        """Accept nothing new; end running requests after `grace` seconds. Blocks."""
        self.scheduler.close(grace)
        self.readers.close()

    @staticmethod
    def now() -> int:
        """Return the time for the field `created`: seconds since 1970."""
        return int(time.time())

    @property
    def files(self) -> ModelFiles:
        return self.prompts.files

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and answer together."""
        return self.scheduler.admission.max_length

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names a different model."""
        if name is not None and name not in (self.name, *self.settings.aliases):
            raise unknown_model(name, self.name)

    @property
    def answer_form(self) -> ToolForm | None:
        """The call format in an answer's text: signed if the tag is one of the model's tokens."""
        form = self.prompts.tool_form
        if form is None or self.grammars.token_of(form.mark) is None:
            return form
        return form.signed()

    def chat(self, body: ChatBody) -> list[BatchRequest]:
        """Return the requests for `n` answers. Raises ApiError and InvalidRequest."""
        self.check_model(body.model)
        text, thoughts = self.prompts.chat(body)
        tokens = self.prompts.chat_tokens(text)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        answer = _Answer(logprobs=logprobs, prediction=self._prediction(body.prediction))
        if body.calling:
            if body.form is not None:
                raise ApiError("cannot be combined with tools", param="response_format")
            if body.structured_outputs is not None:
                raise ApiError("cannot be combined with tools", param="structured_outputs")
            answer = self._with_calls(answer, body, thoughts)
        elif not body.structured:
            answer = answer._replace(thoughts=thoughts)  # a grammar has no place for reasoning
        return self._requests(body, tokens, answer)

    def completions(self, body: CompletionBody) -> list[BatchRequest]:
        """Return the requests for `n` answers to each prompt, in order. Raises as `chat` does."""
        self.check_model(body.model)
        answer = _Answer(
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs is not None and body.echo,
            prediction=self._prediction(body.prediction),
        )
        if body.suffix and self.prompts.infill is not None:
            answer = answer._replace(stops=self.prompts.infill.stops)
        prompts = [
            self.prompts.infill_tokens(prompt, body.suffix)
            if body.suffix
            else self.prompts.tokens(prompt)
            for prompt in body.prompt
        ]
        count = body.continued_tokens
        if count and _constraint(body) is not None:
            raise field_error("continued_tokens", "a structured answer cannot be continued")
        tickets = []
        for tokens in prompts:
            if count:
                answer = answer._replace(thoughts=self.prompts.continued(tokens, count))
            tickets += self._requests(body, tokens, answer)
        return tickets

    def embeddings(self, body: EmbeddingsBody) -> list[BatchRequest]:
        self.check_model(body.model)
        if self.files.facts.pooling is None or FINAL_NORM not in self.model.engine.taps:
            raise ApiError(
                f"{self.name} {NO_EMBEDDINGS}",
                status=HTTPStatus.NOT_IMPLEMENTED,
                code="not_implemented",
            )
        texts = [self.prompts.tokens(text, field="input") for text in body.input]
        requests = map(self.model._embedding_request, texts)
        return [replace(request, timeout=self.settings.timeout) for request in requests]

    def _requests(
        self, body: ChatBody | CompletionBody, tokens: list[int], answer: "_Answer"
    ) -> list[BatchRequest]:
        """Return the `n` requests for answers to one prompt."""
        constraint = answer.constraint or _constraint(body)
        if constraint is not None and body.ignore_eos:
            raise field_error("ignore_eos", "a structured answer ends where its structure ends")
        limit = body.max_tokens
        options = {
            **body.options,
            **self._drafting(body),
            "stop": [*body.stop, *answer.stops],
            "logprobs": answer.logprobs,
            "prompt_logprobs": answer.prompt_logprobs,
            "prediction": answer.prediction,
            **self.limit,
            **({} if limit is None else {"max_tokens": None if limit < 0 else max(limit, 1)}),
        }
        # A salt separates clients: speed must not reveal the answers to others.
        private = bool(body.cache_salt) or limit == 0
        first = self.model._request(cast("Options", options), self.defaults, private=private)
        first = replace(first, thoughts=answer.thoughts, shown=answer.shown)
        seeds = ((first.sampling.seed + index) % 2**64 for index in range(body.n))
        return [
            BatchRequest(
                self.model,
                tokens,
                replace(first, sampling=replace(first.sampling, seed=seed)),
                body.cache_salt,
                body.cache_prompt,
                self.settings.timeout,
                limit == 0,
                index,
                constraint=constraint,
            )
            for index, seed in enumerate(seeds)
        ]

    def _with_calls(
        self, answer: "_Answer", body: ChatBody, thoughts: ReasoningMarks | None
    ) -> "_Answer":
        """Return an answer that may call functions after reasoning."""
        form, choice = self.prompts.tool_form, body.tool_choice
        assert not isinstance(choice, AllowedTools)  # the body has replaced it with its mode
        named = choice.function.name if isinstance(choice, NamedTool) else choice
        if form is None:
            if named == "auto":
                return answer._replace(thoughts=thoughts)
            raise field_error(
                "tool_choice", "this model's tool-call format is unknown; use auto or none"
            )
        functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools]
        special = self.tokenizer.special_tokens()
        shown = {special[mark]: mark for mark in form.tokens if mark in special}
        begins = self.grammars.token_of(form.mark)
        if begins is not None:
            shown[begins] = SIGN + form.mark
        parallel = body.parallel_tool_calls

        def constraint(grammars: Grammars) -> Constraint:
            return grammars.tools(functions, named, parallel=parallel, form=form, thoughts=thoughts)

        return answer._replace(
            constraint=constraint,
            thoughts=replace(thoughts, calls=True) if thoughts and form.channels else thoughts,
            shown=shown,
        )

    def _prediction(self, prediction: Prediction | None) -> list[int] | None:
        if prediction is None:
            return None
        min_tokens = self.token_bytes.min_tokens(prediction.content)
        if min_tokens > self.max_length:
            raise field_error(
                "prediction.content",
                f"has at least {min_tokens} tokens, and an answer at most {self.max_length}",
            )
        return self.tokenizer.encode(prediction.content)

    def _drafting(self, body: GenerationBody) -> dict[str, Any]:
        speculation, settings = body.speculation, self.settings
        block = speculation.max_block
        return {
            "drafter": self._drafter(speculation.drafter),
            "policy": speculation.policy or settings.policy,
            "max_block": settings.max_block if block is None else block,
        }

    def _drafter(self, drafter: str | None) -> str:
        """Return the drafter that a request names. Raises ApiError if it may not."""
        if drafter is None or drafter == self.settings.drafter:
            return self.settings.drafter
        if drafter in ("none", "auto"):
            return drafter
        for part in DrafterSpec.parse(drafter).parts:
            if str(part) not in _SAFE_DRAFTERS and part.kind != "ngram":
                raise ApiError(
                    f"drafter {str(part)[:40]!r} is not allowed in a request; expected none, "
                    f"auto, the server's own, or ngram, {', '.join(_SAFE_DRAFTERS)} joined by +",
                    param="speculation.drafter",
                )
        return drafter


class _Answer(NamedTuple):
    """Answer settings of one kind of body, in addition to the fields that all bodies have."""

    logprobs: int | None = None
    prompt_logprobs: bool = False
    prediction: list[int] | None = None
    stops: Sequence[str] = ()
    thoughts: ReasoningMarks | None = None
    shown: Mapping[int, str] = {}
    constraint: Callable[[Grammars], Constraint | None] | None = None


def _constraint(body: GenerationBody) -> Callable[[Grammars], Constraint | None] | None:
    """Return a function that compiles the constraint of a request, or None without one."""
    form, outputs = body.form, body.structured_outputs
    if outputs is not None and form is not None:
        raise ApiError("cannot be combined with structured_outputs", param="response_format")
    options: Options = {}
    if form is not None:
        if form.json_schema is None:
            return Grammars.json_object
        options = {"json_schema": form.json_schema.schema_}
    elif outputs is not None:
        grammar = outputs.grammar
        if outputs.choice is not None:
            grammar = f"start: {' | '.join(map(literal, outputs.choice))}"
        options = {"json_schema": outputs.schema_, "regex": outputs.regex, "grammar": grammar}
    return (lambda grammars: structure(options, lambda: grammars)) if options else None
