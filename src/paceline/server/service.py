"""The served model, and how the body of a request becomes requests to the scheduler.

Independent of HTTP and of the form of a response. Invariant: no string of a client is used as a
file name.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from paceline.constraints.call_form import ToolForm
from paceline.constraints.call_grammar import literal
from paceline.constraints.grammar import Grammars
from paceline.constraints.tool_forms import tool_form
from paceline.decoding.reasoning import ReasoningMarks
from paceline.decoding.text import SIGN
from paceline.decoding.types import Constraint
from paceline.drafters import DrafterSpec
from paceline.errors import ModelError
from paceline.models.infill import infill_of
from paceline.models.manifest import TOKENIZER
from paceline.models.tokenizer import TokenBytes
from paceline.options import Options
from paceline.runtime.pooled import Embedding
from paceline.runtime.prompt import RenderedChat, render_chat
from paceline.server.api.errors import ApiError, prompt_too_long, unknown_model
from paceline.server.api.response_store import ResponseStore
from paceline.server.api.schema import (
    GenerationBody,
    NamedTool,
    Prediction,
    StructuredOutputs,
    Tool,
)
from paceline.server.readers import Readers
from paceline.server.request import ServerRequest
from paceline.server.scheduler import Scheduler
from paceline.server.settings import Settings
from paceline.server.stream_text import Answer, Answers

_SAMPLED_CHARACTERS = 16
"""Characters of a long text, for each token of the context, that are tokenized to see whether it
may fit."""

_EFFORT = "reasoning_effort"
"""Template variable of a request's reasoning effort."""

_SAFE_DRAFTERS = ("suffix", "table", "prediction")
"""Parts of a drafter that any request may name; `ngram` too, with options. None opens a file that
the server was not started with."""

_FALLBACK = {"temperature": 1.0}
"""OpenAI's default, if neither the request nor the registry nor the model has one."""

_TINY_TOP_P = 1e-9
"""In place of a top_p of 0, by which clients of OpenAI mean the most likely token."""


class Observer(Protocol):
    """Observes the outcome of requests, in the event loop: it must be quick, and not raise."""

    def on_answer(self, request: ServerRequest, answer: Answer) -> None:
        """An answer has ended."""
        ...

    def on_embedding(self, embedding: Embedding) -> None:
        """A text was embedded."""
        ...

    def on_error(self, error: ApiError) -> None:
        """A request ended with an error, perhaps in its stream, or because its client is gone."""
        ...


class NullObserver:
    """An observer that does nothing."""

    def on_answer(self, request: ServerRequest, answer: Answer) -> None:
        """Do nothing."""

    def on_embedding(self, embedding: Embedding) -> None:
        """Do nothing."""

    def on_error(self, error: ApiError) -> None:
        """Do nothing."""


class Service:
    """One model for many clients. Its methods are thread-safe."""

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        """Serve the scheduler's model.

        Raises InvalidRequest if its chat template cannot do what the setting `think` says.
        """
        files = scheduler.model.files
        self.scheduler = scheduler
        self.settings = settings
        self.observer: Observer = NullObserver()
        self.readers = Readers()
        self.files = files
        think = settings.think
        self._thinking = {} if think is None else files.thinking().switch(think)
        self.responses = ResponseStore()
        self.defaults = replace(scheduler.model.defaults, fallback=_FALLBACK)
        self.tokenizer = files.tokenizer()
        self.token_bytes = TokenBytes(self.tokenizer)
        self.infill = infill_of(self.tokenizer)
        self.name = settings.name or served_name(files.name)
        self.created = self.now()
        self.fingerprint = f"fp_{files.fingerprint[:12]}"
        self.grammars = Grammars(
            files.folder / TOKENIZER,
            vocab_size=scheduler.model.engine.vocab_size,
            stop_token_ids=files.stop_token_ids,
        )

    def close(self, grace: float = 0.0) -> None:
        """Accept nothing new; end what still runs after `grace` seconds. Blocks."""
        self.scheduler.close(grace)
        self.readers.close()

    def answers(self, requests: Sequence[ServerRequest]) -> Answers:
        """The answers to the requests of one client; entering them submits the requests."""
        return Answers(self.scheduler, requests, self.observer.on_answer)

    @staticmethod
    def now() -> int:
        """The time for the field `created`: seconds since 1970."""
        return int(time.time())

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.scheduler.admission.max_length

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name is not None and name not in (self.name, *self.settings.aliases):
            raise unknown_model(name, self.name)

    def prompt_tokens(
        self,
        prompt: str | list[int],
        suffix: str = "",
        field: str = "prompt",
        *,
        rendered: bool = False,
    ) -> list[int]:
        """Token ids of a prompt; text is without the chat template, or else `rendered` by it.

        With a `suffix` it asks for the text between the two. `field` is the body's, for errors.

        Raises:
            InvalidRequest: it is empty.
            ApiError: it is too long, or has an unknown token id; or there is a suffix, and the
                model does not fill in the middle.
        """
        if suffix:
            return self._infill_tokens(self.prompt_tokens(prompt), suffix)
        least = self._min_tokens(prompt) if isinstance(prompt, str) else len(prompt)
        if least > self.max_length:  # not worth tokenizing
            raise prompt_too_long(least, self.max_length, at_least=isinstance(prompt, str))
        if rendered and isinstance(prompt, str) and prompt:
            tokens = self.files.control_text().encode(prompt)
        else:
            tokens = self.scheduler.model.tokens(prompt, raw=True)
        vocab_size = self.scheduler.model.engine.vocab_size
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ApiError(f"{field}: has token ids outside 0 to {vocab_size - 1}", param=field)
        if len(tokens) >= self.max_length:
            raise prompt_too_long(len(tokens), self.max_length)
        return tokens

    def _infill_tokens(self, prefix: list[int], suffix: str) -> list[int]:
        if self.infill is None:
            raise ApiError(
                f"{self.name} has no tokens to fill in the middle; leave suffix away",
                param="suffix",
            )
        least = len(prefix) + self._min_tokens(suffix)
        if least <= self.max_length:
            tokens = self.infill.prompt(prefix, suffix)
            if len(tokens) < self.max_length:
                return tokens
            least = len(tokens)
        raise prompt_too_long(least, self.max_length, at_least=True)

    def _min_tokens(self, text: str) -> int:
        """A lower bound of a text's tokens, from tokenizing at most its beginning."""
        sampled = _SAMPLED_CHARACTERS * self.max_length
        if len(text) > 2 * sampled:
            # The cut may be inside a word: the tokens there may merge with later text, but never
            # half of all.
            found = len(self.files.control_text().encode(text[:sampled])) // 2
            if found > self.max_length:
                return found
        return self.token_bytes.min_tokens(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generate: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The text of a chat, and the form of the answer's thoughts.

        With `generate` the text ends with the prompt for an answer. Without a reasoning effort
        among the variables, those of the setting `think` are added.

        Raises:
            InvalidRequest: the template rejects the messages.
            ApiError: the model has no template, or the template fails.
        """
        variables = dict(variables or {})
        if _EFFORT not in variables:
            variables = {**self._thinking, **variables}
        try:
            if generate:
                return render_chat(self.files, messages, variables, tools)
            text = self.files.template().render(
                messages, tools=tools, add_generation_prompt=False, **variables
            )
            return RenderedChat(text, None)
        except ModelError as error:
            reason = str(error).partition(";")[0]
            raise ApiError(f"{reason}; use /v1/completions", param="messages") from error

    @property
    def template_has_tools(self) -> bool:
        """Whether the chat template describes tools to the model."""
        return "tools" in (self.files.chat_template or "")

    @cached_property
    def tool_form(self) -> ToolForm | None:
        """How the model writes tool calls; None: in no known form, so that they remain text."""
        return tool_form(self.files.chat_template)

    def requests(self, body: GenerationBody, tokens: list[int], **more: Any) -> list[ServerRequest]:
        """The `n` requests for answers to one prompt.

        `more` are `Options` that the body does not have under the same names; `constraint`, a
        factory of the answers' constraints; `thoughts`, the form of their thoughts; and `shown`,
        control tokens that are in their text.

        Raises:
            InvalidRequest: a value is out of range.
            ApiError: the server does not support a value.
        """
        constraint: Callable[[Grammars], Constraint] | None
        constraint = more.pop("constraint", None) or self._constraint(body)
        if constraint is not None and body.ignore_eos:
            raise ApiError(
                "ignore_eos: a structured answer ends where its structure ends",
                param="ignore_eos",
            )
        thoughts: ReasoningMarks | None = more.pop("thoughts", None)
        shown: dict[int, str] = more.pop("shown", {})
        chosen: dict[str, Any] = {**_sampling(body), **self._drafting(body), **more}
        limit = body.max_answer_tokens
        if limit is not None:
            chosen["max_tokens"] = max(limit, 1)
        seed = None if body.seed in (None, -1) else body.seed
        found = []
        for index in range(body.n):
            asked: Options = {**chosen}  # type: ignore[typeddict-item]
            asked["seed"] = None if seed is None else (seed + index) % 2**64
            request = ServerRequest(
                tokens,
                replace(
                    # A salt divides clients: speed may not show what another one was answered.
                    self.scheduler.model.request(
                        asked, self.defaults, private=bool(body.cache_salt) or limit == 0
                    ),
                    thoughts=thoughts,
                    shown=shown,
                ),
                body.cache_salt,
                body.cache_prompt,
                self.settings.request_seconds,
                limit == 0,
                index,
                constraint=constraint,
            )
            found.append(request)
        return found

    @staticmethod
    def _constraint(body: GenerationBody) -> Callable[[Grammars], Constraint] | None:
        """A factory of the constraints of a request's answers; None: they have none."""
        wanted, outputs = body.response_format, body.structured_outputs
        if wanted is not None and wanted.type == "json_object":
            return Grammars.json_object
        if wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise ApiError(
                    "response_format.json_schema: is missing", param="response_format.json_schema"
                )
            schema = wanted.json_schema.wanted
            return lambda grammars: grammars.json_schema(schema)
        return None if outputs is None else _structured(outputs)

    def tool_options(
        self,
        tools: list[Tool],
        choice: str | NamedTool,
        *,
        parallel: bool,
        thoughts: ReasoningMarks | None,
    ) -> dict[str, Any]:
        """Options of `requests` for answers that may call functions after thoughts."""
        form = self.tool_form
        named = choice.function.name if isinstance(choice, NamedTool) else choice
        if form is None:
            if named == "auto":
                return {"thoughts": thoughts}
            raise ApiError(
                "tool_choice: this model writes tool calls in an unknown form; use auto or none",
                param="tool_choice",
            )
        functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
        special = self.tokenizer.special_tokens()
        shown = {special[mark]: mark for mark in form.tokens if mark in special}
        begins = self.grammars.token_of(form.mark)
        if begins is not None:
            shown[begins] = SIGN + form.mark

        def constraint(grammars: Grammars) -> Constraint:
            return grammars.tools(functions, named, parallel=parallel, form=form, thoughts=thoughts)

        return {
            "constraint": constraint,
            "thoughts": replace(thoughts, calls=True) if thoughts and form.channels else thoughts,
            "shown": shown,
        }

    def prediction(self, prediction: Prediction | None) -> dict[str, Any]:
        """The option `prediction`, if the request has one."""
        if prediction is None:
            return {}
        least = self.token_bytes.min_tokens(prediction.content)
        if least > self.max_length:
            raise ApiError(
                f"prediction.content: has at least {least} tokens, and an answer at most "
                f"{self.max_length}",
                param="prediction.content",
            )
        return {"prediction": self.tokenizer.encode(prediction.content)}

    def _drafting(self, body: GenerationBody) -> dict[str, Any]:
        wanted, settings = body.speculation, self.settings
        block = settings.max_block if wanted.max_block is None else wanted.max_block
        return {
            "drafter": self._drafter(wanted.drafter),
            "policy": wanted.policy or settings.policy,
            "max_block": block,
        }

    def _drafter(self, wanted: str | None) -> str:
        own = self.settings.drafter
        if wanted in (None, own):
            return own
        if wanted in ("none", "auto"):
            return wanted
        for part in DrafterSpec.parse(wanted).parts:
            if str(part) not in _SAFE_DRAFTERS and part.kind != "ngram":
                raise ApiError(
                    f"drafter {str(part)[:40]!r} is not allowed here; expected none, auto, the "
                    f"server's own, or ngram, {', '.join(_SAFE_DRAFTERS)} joined by +",
                    param="speculation.drafter",
                )
        return wanted


def _structured(outputs: StructuredOutputs) -> Callable[[Grammars], Constraint]:
    if outputs.schema_ is not None:
        return lambda grammars: grammars.json_schema(outputs.schema_ or {})
    if outputs.regex is not None:
        return lambda grammars: grammars.regex(outputs.regex or "")
    if outputs.choice is not None:
        choices = " | ".join(literal(each) for each in outputs.choice)
        return lambda grammars: grammars.lark(f"start: {choices}")
    if outputs.grammar is not None:
        return lambda grammars: grammars.lark(outputs.grammar or "")
    raise ApiError(
        "structured_outputs has none of json, regex, choice and grammar",
        param="structured_outputs",
    )


def _sampling(body: GenerationBody) -> dict[str, Any]:
    """The sampling options that a body sets."""
    names = [
        *("temperature", "top_k", "top_p", "min_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ]
    chosen = {name: value for name in names if (value := getattr(body, name)) is not None}
    if chosen.get("top_k") == -1:
        chosen["top_k"] = 0
    if chosen.get("top_p") == 0:
        chosen["top_p"] = _TINY_TOP_P
    if body.repetition_detection is not None:
        chosen["repetition_detection"] = body.repetition_detection.model_dump()
    return {
        **chosen,
        "logit_bias": body.logit_bias,
        "stop": body.stop,
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
    }


def served_name(name: str) -> str:
    """The API's name of a model that was loaded as `name`: the last part of a path."""
    return Path(name).name.removesuffix(".gguf") if Path(name).exists() else name
