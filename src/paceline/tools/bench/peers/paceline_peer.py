"""paceline itself: plain decoding and auto, each answer a first request."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.runtime.model import Model
from paceline.runtime.options import GREEDY, Options
from paceline.tools.bench.ab_test import PLAIN
from paceline.tools.bench.peers.base import Answer, Question

AUTO = "auto"
_DRAFTERS = {PLAIN: "none", AUTO: "auto"}


class Ours:
    """paceline, as `generate` runs it."""

    name = "paceline"
    packages: Sequence[str] = ()
    settings: Mapping[str, Any] = {}
    ways = tuple(_DRAFTERS)

    def __init__(self, model: Model) -> None:
        """Of a model that has been measured."""
        self._model = model

    def answer(self, question: Question, max_tokens: int, way: str) -> Answer:
        """See `Peer`."""
        options: Options = {**GREEDY, "max_tokens": max_tokens, "drafter": _DRAFTERS[way]}
        found = self._model.fresh().generate(question.tokens, **options)
        stops = self._model.files.stop_token_ids
        ended = found.token_ids[-1] in stops
        return Answer(
            found.text,
            found.token_ids[: -1 if ended else None],
            found.completion_tokens,
            found.stats.first_token_seconds,
            found.stats.decode_seconds,
        )
