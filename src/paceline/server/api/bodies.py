"""The bodies of requests, path by path, as far as they mean something here."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from paceline.server.api.errors import Refused
from paceline.server.api.schema import Body, Common, Text, wrong

MOST_PROMPTS = 128
"""The most prompts in one request."""

MOST_MESSAGES = 10_000
"""The most turns of a chat: as many take a quarter of a second to read."""

_COMPLETION_TOKENS = 16
"""What OpenAI's completions end after where a request does not say."""


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model is to think, as OpenAI has it."""


class Function(Body):
    """A function that the model may ask for."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """OpenAI's wrapping of a function."""

    type: Literal["function"]
    function: Function


class NamedTool(Body):
    """The one function that has to be called."""

    class Name(Body):
        """Its name."""

        name: str

    type: Literal["function"]
    function: Name


class Prediction(Body):
    """What the answer is expected to have much of."""

    type: Literal["content"]
    content: Text


class CalledFunction(Body):
    """A function that an earlier answer asked for."""

    name: str
    arguments: str = "{}"


class Called(Body):
    """OpenAI's wrapping of it."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    """The thoughts of an earlier answer."""
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise wrong("has no content")
        return self


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=-1)
    """-1 is no limit, as in llama.cpp; 0 reads the prompt and answers nothing."""
    max_completion_tokens: int | None = Field(default=None, ge=-1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
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
    def _fits(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            raise Refused("top_logprobs is for logprobs: true", param="top_logprobs")
        if self.functions:
            raise Refused("functions is not known any more; use tools", param="functions")
        if self.modalities != ["text"]:
            raise Refused("this model writes text and nothing else", param="modalities")
        if self.tool_choice not in ("none", "auto") and not self.tools:
            raise Refused("tool_choice asks for a call, but there are no tools", param="tools")
        return self

    @property
    def most(self) -> int | None:
        """Tokens in the answer."""
        given = self.max_completion_tokens
        return _unlimited(self.max_tokens if given is None else given)


def _prompts(value: Any) -> Any:
    """One prompt or several, each a text or token ids."""
    ids = isinstance(value, list) and value and all(type(each) is int for each in value)
    return [value] if isinstance(value, str) or ids else value


class CompletionBody(Common):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(
            _prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]
        ),
    ] = Field(min_length=1, max_length=MOST_PROMPTS)
    max_tokens: int = Field(default=_COMPLETION_TOKENS, ge=-1)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    suffix: str = ""
    best_of: int | None = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _fits(self) -> "CompletionBody":
        if self.suffix:
            raise Refused("this model does not fill in the middle", param="suffix")
        if self.best_of not in (None, self.n):
            raise Refused("best_of can only be what n is", param="best_of")
        if self.stream and self.echo and self.logprobs is not None:
            raise Refused(
                "a stream cannot echo the prompt with logprobs: they are known at its end",
                param="echo",
            )
        return self

    @property
    def most(self) -> int | None:
        """Tokens in the answer."""
        return _unlimited(self.max_tokens)


class TokenizeBody(Body):
    """POST /tokenize: a `prompt` or `messages` as in vLLM, or `content` as in llama.cpp."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MOST_MESSAGES)
    add_generation_prompt: bool = True
    add_special_tokens: bool = Field(
        default=True, validation_alias=AliasChoices("add_special_tokens", "add_special")
    )
    parse_special: bool = True
    return_token_strs: bool = False
    with_pieces: bool = False

    @model_validator(mode="before")
    @classmethod
    def _nothing_special(cls, data: Any) -> Any:
        # With `content` it is llama.cpp's call, which adds nothing unless it is told to.
        if isinstance(data, Mapping) and data.get("content") is not None:
            return {"add_special": False, **data}
        return data


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def _unlimited(most: int | None) -> int | None:
    return None if most == -1 else most
