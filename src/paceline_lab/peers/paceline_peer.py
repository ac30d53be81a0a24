"""paceline itself as a peer: plain decoding and `auto`, without state from earlier requests."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.options import GREEDY, Options
from paceline.runtime.model import Model
from paceline_lab.bench.ab_test import PLAIN
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.peers.base import PeerAnswer

AUTO = "auto"
_DRAFTERS = {PLAIN: "none", AUTO: "auto"}


class PacelinePeer:
    """paceline with the options of `generate`."""

    name = "paceline"
    settings: Mapping[str, Any] = {}
    modes: Sequence[str] = tuple(_DRAFTERS)

    def __init__(self, model: Model) -> None:
        """Use a model whose costs have been measured."""
        self.model = model

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        options: Options = {**GREEDY, "max_tokens": max_tokens, "drafter": _DRAFTERS[mode]}
        result = self.model.without_history().generate(question.tokens, **options)
        ended = result.token_ids[-1] in self.model.files.stop_token_ids
        return PeerAnswer(
            result.text,
            result.token_ids[: -1 if ended else None],
            result.completion_tokens,
            result.stats.first_token_seconds,
            result.stats.decode_seconds,
            draft=(result.stats.drafted, result.stats.accepted),
        )
