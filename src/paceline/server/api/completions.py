"""POST /v1/completions: prompts as they are, text or token ids, several at once."""

import secrets
from collections.abc import Sequence
from typing import Any

from paceline.server.api.bodies import CompletionBody
from paceline.server.api.errors import Refused
from paceline.server.api.logprobs import completion_logprobs
from paceline.server.api.schema import read
from paceline.server.api.sse import DONE, event
from paceline.server.api.usage import telemetry, usage
from paceline.server.delivery import News
from paceline.server.service import Service
from paceline.server.stream_text import Answer, Piece, pieces_of


class Completions:
    """Prompts that were understood, and how what follows them is written down.

    Of n answers to each prompt, those to the prompt at place p have the indices from p * n on.
    """

    def __init__(self, service: Service, text: bytes) -> None:
        """Understand a body. Raises Refused or PacelineError when it cannot be served."""
        body = read(CompletionBody, text)
        service.check_model(body.model)
        self._service, self._body = service, body
        self.streamed = body.stream
        self._prompts = [service.prompt(prompt) for prompt in body.prompt]
        options: dict[str, Any] = service.predicted(body.prediction)
        if body.logprobs is not None:
            options |= {"logprobs": body.logprobs, "prompt_logprobs": body.echo}
        self.asks = [
            ask for tokens in self._prompts for ask in service.asks(body, tokens, **options)
        ]
        self._echoes = [self._echo(tokens) if body.echo else [] for tokens in self._prompts]
        self._new = [True] * len(self.asks)
        self._base: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": service.now(),
            "model": service.name,
            "system_fingerprint": service.fingerprint,
        }

    def _echo(self, tokens: list[int]) -> list[Piece]:
        return pieces_of(self._service.tokenizer.decode, tokens)

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The response that is sent at once."""
        choices = []
        for index, answer in enumerate(answers):
            echo = self._echoes[index // self._body.n]
            if self._body.echo and self._body.logprobs is not None:
                known = answer.done.prompt_logprobs
                echo = [
                    piece._replace(likely=likely) for piece, likely in zip(echo, known, strict=True)
                ]
            text = "".join(piece.text for piece in echo)
            choice = self._choice(index, text + answer.text, _after(echo, answer.pieces))
            if self._body.return_token_ids:
                choice["prompt_token_ids"] = self._prompts[index // self._body.n]
                choice["token_ids"] = [piece.token for piece in answer.pieces]
            choices.append({**choice, "finish_reason": str(answer.finish_reason)})
        found = {**self._base, "choices": choices, "usage": self._usage(answers)}
        return {**found, **self._telemetry(answers)}

    def opening(self) -> bytes:
        """The prompts, where they are echoed."""
        if not self._body.echo:
            return b""
        found = b""
        for index in range(len(self.asks)):
            text = "".join(piece.text for piece in self._echoes[index // self._body.n])
            found += event({**self._base, "choices": [self._choice(index, text, ())]})
        return found

    def news(self, news: News, answers: Sequence[Answer]) -> bytes:
        """A chunk for something new."""
        text, pieces = news.part.text, news.part.pieces
        body = self._body
        wanted = body.return_token_ids or body.logprobs is not None or body.speculation.pieces
        if not (text or news.ended or (pieces and wanted)):
            return b""
        choice = self._choice(news.place, text, pieces)
        if self._body.return_token_ids:
            choice["token_ids"] = [piece.token for piece in pieces]
            if self._new[news.place]:
                choice["prompt_token_ids"] = self._prompts[news.place // self._body.n]
        if self._body.speculation.pieces:
            choice["speculation"] = answers[news.place].speculation
        self._new[news.place] = False
        if news.ended:
            choice["finish_reason"] = str(answers[news.place].finish_reason)
        chunk: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._body.usage_always:
            chunk["usage"] = self._usage(answers)
        elif self._body.usage_wanted:
            chunk["usage"] = None
        elif news.ended and all(answer.result is not None for answer in answers):
            chunk |= self._telemetry(answers)
        return event(chunk)

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

    def _choice(self, index: int, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        top = self._body.logprobs
        logprobs = None
        if top is not None and (pieces or not self._body.stream):
            logprobs = completion_logprobs(self._service.words, pieces, top)
        found: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if self._body.speculation.pieces:
            found["pieces"] = [{"text": each.text, "source": each.source} for each in pieces]
        return found

    def _usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        counts = [len(tokens) for tokens in self._prompts]
        return usage(counts, answers, predicted=self._body.prediction is not None)

    def _telemetry(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return telemetry(answers, steps=self._body.speculation.pieces)


def _after(before: list[Piece], pieces: list[Piece]) -> list[Piece]:
    """Pieces behind others, in one text."""
    shift = before[-1].end if before else 0
    return [*before, *(piece._replace(start=piece.start + shift) for piece in pieces)]
