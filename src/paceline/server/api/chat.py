"""POST /v1/chat/completions."""

import secrets
from collections.abc import Sequence
from typing import Any

from paceline.constraints.tool_calls import ToolCall
from paceline.decoding.reasoning import Thoughts
from paceline.decoding.types import FinishReason
from paceline.errors import InvalidRequest
from paceline.runtime.options import TEMPLATE_NAMES
from paceline.server.api.bodies import ChatBody
from paceline.server.api.errors import Refused
from paceline.server.api.logprobs import chat_logprobs
from paceline.server.api.schema import read
from paceline.server.api.sse import DONE, event
from paceline.server.api.tool_calls import Told, spelt_out, turns, written
from paceline.server.api.usage import telemetry, usage
from paceline.server.delivery import News
from paceline.server.service import Service
from paceline.server.stream_text import Answer, Piece


class Chat:
    """A chat that was understood, and how its answers are written down."""

    def __init__(self, service: Service, text: bytes) -> None:
        """Understand a body. Raises Refused or PacelineError when it cannot be served."""
        body = read(ChatBody, text)
        service.check_model(body.model)
        self._service, self._body = service, body
        self.streamed = body.stream
        self._calling = bool(body.tools) and body.tool_choice != "none"
        self._tokens, thoughts = self._prompt()
        options: dict[str, Any] = service.predicted(body.prediction)
        if self._may_think():
            options["thoughts"] = thoughts
        if body.logprobs:
            options["logprobs"] = body.top_logprobs or 0
        if self._calling:
            if body.response_format is not None and body.response_format.type != "text":
                raise Refused("cannot go together with tools", param="response_format")
            options["form"] = service.calls(
                body.tools, body.tool_choice, parallel=body.parallel_tool_calls
            )
        self.asks = service.asks(body, self._tokens, **options)
        self._told = [Told() for _ in self.asks]
        self._new = [True] * body.n
        self._base: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": service.now(),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def _may_think(self) -> bool:
        """Whether the answer's form leaves room for thoughts before it."""
        body = self._body
        if self._calling:
            return body.tool_choice == "auto"
        wanted = body.response_format
        return body.structured_outputs is None and (wanted is None or wanted.type == "text")

    def _prompt(self) -> tuple[list[int], Thoughts | None]:
        """The prompt's tokens, and the form of the thoughts that the model may have."""
        body, thinking = self._body, self._service.files.thinking()
        if wrong := TEMPLATE_NAMES & body.chat_template_kwargs.keys():
            raise Refused(f"cannot set {min(wrong)}", param="chat_template_kwargs")
        chat, tools = turns(body.messages, thinking), body.tools if self._calling else []
        if not self._service.knows_tools:
            chat, tools = spelt_out(chat, tools), []
        listed = [tool.model_dump(exclude_none=True) for tool in tools] or None
        extra = body.chat_template_kwargs
        if body.reasoning_effort is not None:
            extra = {**self._effort(body.reasoning_effort), **extra}
        text, thoughts = self._service.rendered(chat, tools=listed, extra=extra)
        return self._service.prompt(text), thoughts

    def _effort(self, effort: str) -> dict[str, Any]:
        try:
            return self._service.files.thinking().effort(effort)
        except InvalidRequest as error:
            raise Refused(f"{effort!r}: {error}", param="reasoning_effort") from error

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response that is sent at once."""
        choices = []
        for index, answer in enumerate(answers):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": answer.text,
                "refusal": None,
            }
            calls: tuple[ToolCall, ...] = ()
            if self._calling:
                said = self._told[index].push(answer.text)
                rest, calls = self._told[index].finish()
                message["content"] = said + rest
            if calls:
                message |= {"content": message["content"] or None, "tool_calls": written(calls)}
            message |= self._thought(answer.reasoning)
            choices.append(
                {
                    "index": index,
                    "message": message,
                    **self._about(answer.pieces),
                    "finish_reason": _reason(answer, called=bool(calls)),
                }
            )
        found = {**self._base, "choices": choices, "usage": self._usage(answers)}
        if self._body.return_token_ids:
            found["prompt_token_ids"] = self._tokens
        return {**found, **telemetry(answers, steps=self._body.speculation.pieces)}

    def opening(self) -> bytes:
        """Nothing: the first chunk comes with the first text."""
        return b""

    def news(self, news: News, answers: Sequence[Answer]) -> bytes:
        """Chunks for something new."""
        told, found = self._told[news.place], b""
        pieces = news.part.pieces
        if thought := self._thought(news.part.reasoning):
            # Of a step with both a thought and text, the tokens go with the thought.
            found = self._chunk(news.place, thought, pieces, answers)
            pieces = []
        text = told.push(news.part.text) if self._calling else news.part.text
        if not news.ended:
            if not (text or self._worth_telling(pieces)):
                return found
            return found + self._chunk(news.place, {"content": text}, pieces, answers)
        rest, calls = told.finish() if self._calling else ("", ())
        text += rest
        if text or self._worth_telling(pieces) or self._new[news.place]:
            found += self._chunk(news.place, {"content": text}, pieces, answers)
        if calls:
            delta = {"tool_calls": written(calls, indexed=True)}
            found += self._chunk(news.place, delta, (), answers)
        reason = _reason(answers[news.place], called=bool(calls))
        return found + self._chunk(news.place, {}, (), answers, reason)

    def _thought(self, text: str) -> dict[str, str]:
        """The fields of a message or delta that have a thought; none of it where there is none."""
        if not (text and self._body.include_reasoning):
            return {}
        return {"reasoning_content": text, "reasoning": text}  # llama.cpp's name, and vLLM's

    def closing(self, answers: Sequence[Answer]) -> bytes:
        """What was used, where that was asked for."""
        found = b""
        if self._body.usage_wanted:
            end = {**self._base, "choices": [], "usage": self._usage(answers)}
            found = event({**end, **self._telemetry(answers)})
        return found + DONE

    def failure(self, error: Refused) -> bytes:
        """An error in the middle."""
        return event(error.body) + DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        pieces: Sequence[Piece],
        answers: Sequence[Answer],
        reason: str | None = None,
    ) -> bytes:
        if self._new[index]:
            delta = {"role": "assistant", **delta}
        choice = {"index": index, "delta": delta, **self._about(pieces), "finish_reason": reason}
        if self._body.speculation.pieces:
            choice["speculation"] = answers[index].speculation
        chunk: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._body.return_token_ids and self._new[index]:
            chunk["prompt_token_ids"] = self._tokens
        self._new[index] = False
        if self._body.usage_always:
            chunk["usage"] = self._usage(answers)
        elif self._body.usage_wanted:
            chunk["usage"] = None
        elif reason and all(answer.result is not None for answer in answers):
            chunk |= self._telemetry(answers)
        return event(chunk)

    def _about(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What is said of a choice's tokens."""
        body, found = self._body, dict[str, Any](logprobs=None)
        if body.logprobs and (pieces or not body.stream):
            content = chat_logprobs(self._service.words, pieces)
            found["logprobs"] = {"content": content, "refusal": None}
        if body.return_token_ids:
            found["token_ids"] = [piece.token for piece in pieces]
        if body.speculation.pieces:
            found["pieces"] = [{"text": each.text, "source": each.source} for each in pieces]
        return found

    def _worth_telling(self, pieces: Sequence[Piece]) -> bool:
        """Whether tokens are told that have no text yet."""
        body = self._body
        wanted = body.return_token_ids or body.logprobs or body.speculation.pieces
        return bool(pieces) and wanted

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return usage([len(self._tokens)], answers, predicted=self._body.prediction is not None)

    def _telemetry(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return telemetry(answers, steps=self._body.speculation.pieces)


def _reason(answer: Answer, *, called: bool) -> str:
    if called and answer.finish_reason == FinishReason.STOP:
        return "tool_calls"
    return str(answer.finish_reason)
