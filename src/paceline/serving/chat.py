"""POST /v1/chat/completions."""

import secrets
from collections.abc import Sequence
from typing import Any

from paceline.decoding.types import FinishReason
from paceline.serving.answers import News
from paceline.serving.bodies import ChatBody
from paceline.serving.calls import Told, spelt_out, turns, written
from paceline.serving.errors import Refused
from paceline.serving.logprobs import chat_logprobs
from paceline.serving.pieces import Answer, Piece
from paceline.serving.reply import DONE, event
from paceline.serving.report import telemetry, usage
from paceline.serving.schema import read
from paceline.serving.service import Service
from paceline.tool_calls import ToolCall

_OURS = {"self", "messages", "tools", "add_generation_prompt"}
"""Variables of a template that `chat_template_kwargs` may not set."""


class Chat:
    """A chat that was understood, and how its answers are written down."""

    def __init__(self, service: Service, text: bytes) -> None:
        """Understand a body. Raises Refused or PacelineError when it cannot be served."""
        body = read(ChatBody, text)
        service.check_model(body.model)
        self._service, self._body = service, body
        self.streamed = body.stream
        self._calling = bool(body.tools) and body.tool_choice != "none"
        self._tokens = self._prompt()
        options: dict[str, Any] = service.predicted(body.prediction)
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

    def _prompt(self) -> list[int]:
        body = self._body
        if wrong := _OURS & body.chat_template_kwargs.keys():
            raise Refused(f"cannot set {min(wrong)}", param="chat_template_kwargs")
        chat, tools = turns(body.messages), body.tools if self._calling else []
        if not self._service.knows_tools:
            chat, tools = spelt_out(chat, tools), []
        listed = [tool.model_dump(exclude_none=True) for tool in tools] or None
        text = self._service.rendered(chat, tools=listed, extra=body.chat_template_kwargs)
        return self._service.prompt(text)

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
        told = self._told[news.place]
        text = told.push(news.part.text) if self._calling else news.part.text
        if not news.ended:
            if not (text or self._worth_telling(news.part.pieces)):
                return b""
            return self._chunk(news.place, {"content": text}, news.part.pieces, answers)
        rest, calls = told.finish() if self._calling else ("", ())
        found, text = b"", text + rest
        if text or self._worth_telling(news.part.pieces) or self._new[news.place]:
            found += self._chunk(news.place, {"content": text}, news.part.pieces, answers)
        if calls:
            delta = {"tool_calls": written(calls, indexed=True)}
            found += self._chunk(news.place, delta, (), answers)
        reason = _reason(answers[news.place], called=bool(calls))
        return found + self._chunk(news.place, {}, (), answers, reason)

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
