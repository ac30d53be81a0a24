"""POST /v1/completions: literal prompts, text or token ids, several per request."""

from collections.abc import Sequence
from typing import Any

from paceline.decoding.text import Decode, TextStream
from paceline.decoding.types import Piece
from paceline.server.api.endpoint import ApiRequest
from paceline.server.api.logprobs import completion_logprobs
from paceline.server.body import CompletionBody
from paceline.server.http import event
from paceline.server.service import Service
from paceline.server.stream_text import Delta


class Completions(ApiRequest[CompletionBody]):
    """Prompts and their answers; the n answers to prompt p have indices starting at p * n."""

    body_kind = CompletionBody
    templated = False
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, service: Service, body: CompletionBody, client: int) -> None:
        super().__init__(service, body, client)
        self.requests = service.completions(body)
        self._predicted = body.prediction is not None
        decode = service.tokenizer.decode
        self._echoes = [prompt_pieces(decode, t) if body.echo else [] for t in self.prompts]
        self._offsets = [0] * len(self.requests)  # characters sent so far, per answer

    def response(self) -> dict[str, Any]:
        choices = []
        for index, answer in enumerate(self.answers):
            prompt, echo = self._prompt(index)
            if self._body.echo and self._body.logprobs is not None:
                pairs = zip(echo, answer.done.prompt_logprobs, strict=True)
                echo = [piece._replace(logprobs=logprobs) for piece, logprobs in pairs]
            text = "".join(piece.text for piece in echo)
            choice = self._choice(index, text + answer.text, [*echo, *answer.pieces])
            if self._body.return_token_ids:
                choice |= {"prompt_token_ids": prompt}
                choice |= {"token_ids": [piece.token for piece in answer.pieces]}
            if answer.reasoning:
                choice["reasoning_content"] = answer.reasoning
            choices.append({**choice, "finish_reason": str(answer.finish_reason)})
        return self._complete_response(choices)

    def stream_start(self) -> bytes:
        events = b""
        for index in range(len(self.requests) if self._body.echo else 0):
            text = "".join(piece.text for piece in self._prompt(index)[1])
            choice = self._choice(index, text, ())
            choice.pop("token_ids", None)
            events += event({**self._base, "choices": [choice]})
        return events

    def delta_events(self, delta: Delta) -> bytes:
        index, pieces = delta.index, delta.pieces
        listed = self._lists_tokens(pieces, logprobs=self._body.logprobs is not None)
        if not (delta.text or delta.reasoning or delta.finished or listed):
            return b""
        choice = self._choice(index, delta.text, pieces)
        if delta.reasoning:
            choice["reasoning_content"] = delta.reasoning
        if self._body.return_token_ids and index not in self._sent:
            choice["prompt_token_ids"] = self._prompt(index)[0]
        if delta.finished:
            choice["finish_reason"] = str(self.answers[index].finish_reason)
        return self._chunk(choice, last=delta.finished)

    def _prompt(self, index: int) -> tuple[list[int], list[Piece]]:
        """Return the prompt of an answer, and its pieces to echo."""
        place = index // self._body.n
        return self.prompts[place], self._echoes[place]

    def _choice(self, index: int, text: str, pieces: Sequence[Piece]) -> dict[str, Any]:
        top = self._body.logprobs
        logprobs = None
        if top is not None and (pieces or not self._body.stream):
            start = self._offsets[index]
            logprobs = completion_logprobs(self._service.token_bytes, pieces, top, start)
            self._offsets[index] += sum(len(piece.text) for piece in pieces)
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return {**choice, **self._token_fields(pieces)}


def prompt_pieces(decode: Decode, tokens: Sequence[int]) -> list[Piece]:
    """Return a prompt's tokens, each with its text."""
    stream = TextStream(decode)
    *pieces, last = [stream.push(token) for token in tokens]
    return [*pieces, stream.finish(last)]
