"""POST /v1/chat/completions."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from paceline.constraints.call_form import ToolForm
from paceline.constraints.tool_calls import CallStream, Part, ToolCall, parse_tool_calls
from paceline.constraints.tool_forms import HERMES
from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest
from paceline.options import TEMPLATE_NAMES
from paceline.runtime.prompt import RenderedChat
from paceline.server.api.endpoint import ApiRequest
from paceline.server.api.errors import ApiError
from paceline.server.api.logprobs import chat_logprobs
from paceline.server.api.schema import (
    MAX_MESSAGES,
    Effort,
    GenerationBody,
    Logprobs,
    Message,
    NamedTool,
    Prediction,
    Tool,
)
from paceline.server.api.tool_calls import (
    describe_tools,
    fit_calls,
    function_schemas,
    openai_calls,
    openai_delta,
    template_messages,
)
from paceline.server.service import Service
from paceline.server.stream_text import Answer, Delta, Piece


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=-1)
    """-1 is no limit, as in llama.cpp; 0 computes the prompt alone."""
    max_completion_tokens: int | None = Field(default=None, ge=-1)
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: list[Tool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})
    reasoning_effort: Effort | None = None
    """`none` turns thinking off."""
    include_reasoning: bool = True
    """Whether thoughts are sent, as in vLLM."""
    functions: list[Any] = Field(default=[])
    modalities: list[str] = Field(default=["text"])

    @model_validator(mode="after")
    def _consistent(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs requires logprobs: true", param="top_logprobs")
        if self.functions:
            raise ApiError("functions is not supported; use tools", param="functions")
        if self.modalities != ["text"]:
            raise ApiError("the model's output is text alone", param="modalities")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise ApiError("tool_choice requires a call, but there are no tools", param="tools")
        return self

    @property
    def max_answer_tokens(self) -> int | None:
        """Limit of the answer's tokens; None: the rest of the context."""
        given = self.max_completion_tokens
        given = self.max_tokens if given is None else given
        return None if given == -1 else given

    @property
    def calling(self) -> bool:
        """Whether the answer may call functions."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced(self) -> bool:
        """Whether the answer consists of calls."""
        return self.calling and self.tool_choice != "auto"


class Chat(ApiRequest[ChatBody]):
    """A chat and its answers."""

    body_kind = ChatBody
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl-"

    def __init__(self, service: Service, body: ChatBody) -> None:
        """Prepare. Raises ApiError or PacelineError if it cannot be served."""
        super().__init__(service, body)
        self._predicted = body.prediction is not None
        self._calling = body.calling
        self.forced = body.forced
        text, thoughts = rendered(service, body)
        self._tokens = service.prompt_tokens(text, rendered=True)
        self.prompts = [self._tokens]
        options: dict[str, Any] = service.prediction(body.prediction)
        if self._may_think():
            options["thoughts"] = thoughts
        if body.logprobs:
            options["logprobs"] = body.top_logprobs or 0
        if self._calling:
            if body.response_format is not None and body.response_format.type != "text":
                raise ApiError("cannot be combined with tools", param="response_format")
            options |= service.tool_options(
                body.tools,
                body.tool_choice,
                parallel=body.parallel_tool_calls,
                thoughts=thoughts,
            )
        self.requests = service.requests(body, self._tokens, **options)
        self.tool_form = answer_form(service) if self._calling else None
        self.functions = function_schemas(body.tools)
        self.call_streams = [
            CallStream(self.tool_form, self.functions, forced=body.forced)
            for _ in self.requests
            if self.tool_form
        ]
        self._called: set[int] = set()

    def _may_think(self) -> bool:
        """Whether the constraint of the answer allows thoughts before it."""
        body = self._body
        wanted = body.response_format
        return body.structured_outputs is None and (wanted is None or wanted.type == "text")

    def response(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The complete response."""
        choices = []
        for index, answer in enumerate(answers):
            content: str | None = answer.text
            calls: tuple[ToolCall, ...] = ()
            if self.tool_form:
                content, calls = parse_tool_calls(
                    answer.signed, self.tool_form, self.functions, forced=self.forced
                )
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if calls:
                message |= {
                    "content": content or None,
                    "tool_calls": openai_calls(calls, self.tool_form),
                }
            message |= self._reasoning(answer.reasoning)
            reason = _finish_reason(answer, called=bool(calls))
            choices.append(self._choice(index, {"message": message}, answer.pieces, reason))
        more = {"prompt_token_ids": self._tokens} if self._body.return_token_ids else {}
        return self._whole(choices, answers, **more)

    def delta_events(self, delta: Delta, answers: Sequence[Answer]) -> bytes:
        """Chunks for a delta."""
        index, pieces, found = delta.index, delta.pieces, b""
        if reasoning := self._reasoning(delta.reasoning):
            # If a step has both thoughts and text, its tokens are sent with the thoughts.
            found = self._delta_chunk(index, reasoning, pieces, answers)
            pieces = []
        parts = [
            part
            for part in self.parts(delta)
            if isinstance(part, str) or part.name or part.arguments
        ]
        if not parts and self._lists_tokens(pieces, logprobs=self._body.logprobs):
            parts = [""]
        for part in parts:
            if isinstance(part, str):
                fields: dict[str, Any] = {"content": part}
            else:
                self._called.add(index)
                fields = {"tool_calls": [openai_delta(part, self.tool_form)]}
            found += self._delta_chunk(index, fields, pieces, answers)
            pieces = []
        if delta.finished:
            if index not in self._sent:
                found += self._delta_chunk(index, {"content": ""}, (), answers)
            reason = _finish_reason(answers[index], called=index in self._called)
            found += self._delta_chunk(index, {}, (), answers, reason)
        return found

    def parts(self, delta: Delta) -> list[Part]:
        """Content and parts of calls that new text of an answer completes."""
        if not self.tool_form:
            return [delta.text] if delta.text else []
        splitter = self.call_streams[delta.index]
        parts = splitter.push(delta.signed)
        return parts + splitter.finish() if delta.finished else parts

    def _reasoning(self, text: str) -> dict[str, str]:
        """The fields of a message or delta for thoughts."""
        if not (text and self._body.include_reasoning):
            return {}
        return {"reasoning_content": text, "reasoning": text}  # llama.cpp's name, and vLLM's

    def _delta_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        pieces: Sequence[Piece],
        answers: Sequence[Answer],
        reason: str | None = None,
    ) -> bytes:
        more = {}
        if index not in self._sent:
            delta = {"role": "assistant", **delta}
            more = {"prompt_token_ids": self._tokens} if self._body.return_token_ids else {}
        choice = self._choice(index, {"delta": delta}, pieces, reason)
        return self._chunk(choice, answers, last=reason is not None, **more)

    def _choice(
        self, index: int, content: dict[str, Any], pieces: Sequence[Piece], reason: str | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs and (pieces or not self._body.stream):
            listed = chat_logprobs(self._service.token_bytes, pieces)
            logprobs = {"content": listed, "refusal": None}
        fields = {"logprobs": logprobs, **self._token_fields(pieces), "finish_reason": reason}
        return {"index": index, **content, **fields}


def answer_form(service: Service) -> ToolForm | None:
    """The form of calls in an answer's text: signed if the mark is a token of the model.

    Raises MissingExtra or ModelError, as `Grammars` does.
    """
    form = service.tool_form
    if form is None or service.grammars.token_of(form.mark) is None:
        return form
    return form.signed()


def rendered(service: Service, body: ChatBody) -> RenderedChat:
    """The prompt of a chat, and the form of the answer's thoughts.

    Raises ApiError or InvalidRequest if the chat template cannot do what the body asks.
    """
    thinking = service.files.thinking()
    if wrong := TEMPLATE_NAMES & body.chat_template_kwargs.keys():
        raise ApiError(f"cannot set {min(wrong)}", param="chat_template_kwargs")
    guarded = _guard(service)
    tools = body.tools if body.calling else []
    chat = template_chat(service, body.messages, tools)
    listed = [tool.model_dump(exclude_none=True) for tool in tools]
    listed = guarded(listed) if service.template_has_tools else []
    variables = guarded(body.chat_template_kwargs)
    if effort := body.reasoning_effort:
        try:
            variables = {**thinking.effort(effort), **variables}
        except InvalidRequest as error:
            raise ApiError(f"{effort!r}: {error}", param="reasoning_effort") from error
    return service.render_chat(chat, tools=listed or None, variables=variables)


def template_chat(
    service: Service, messages: Sequence[Message], tools: Sequence[Tool] = ()
) -> list[dict[str, Any]]:
    """Messages as the chat template expects them; they have `tools` if it knows none.

    Names of control tokens in them are guarded. Raises ApiError or InvalidRequest.
    """
    chat = template_messages(messages, service.files.thinking())
    if not service.settings.parse_special:
        chat = service.files.control_text().guarded_messages(chat)
    if service.template_has_tools:
        return fit_calls(chat, service.tool_form, service.files.chat_template or "")
    guarded = _guard(service)
    texts = [guarded(tool.model_dump_json(exclude_none=True)) for tool in tools]
    return describe_tools(chat, texts, service.tool_form or HERMES)


def _guard(service: Service) -> Callable[[Any], Any]:
    """Guards names of control tokens in a request's JSON, unless they are to be parsed."""
    if service.settings.parse_special:
        return lambda value: value
    return service.files.control_text().guarded


def _finish_reason(answer: Answer, *, called: bool) -> str:
    if called and answer.finish_reason == FinishReason.STOP:
        return "tool_calls"
    return str(answer.finish_reason)
