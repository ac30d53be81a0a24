"""mlx-lm: plain decoding, and a smaller draft model. It has no prompt lookup."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline_lab.peers.base import Answer, Peer, Question
from paceline_lab.peers.target import TargetModel

PLAIN, DRAFT = "plain", "draft model"

_DRAFT_TOKENS = 3
"""Default of its command `mlx_lm.generate`."""

_GROUP, _BITS = 64, 8
"""Weights as of `mlx_lm.convert -q --q-bits 8`, unless they are quantized already: about as many
bytes per token as paceline reads. If paceline runs the checkpoint itself, so does mlx-lm."""


def open_peers(target: TargetModel) -> list[Peer]:
    """mlx-lm.

    Raises:
        MissingExtra: a package that makes the Hugging Face checkpoint is not installed.
        ModelError: the model has no checkpoint.
    """
    return [MlxLm(target)]


class MlxLm:
    """The model on MLX's default device."""

    name = "mlx-lm"
    packages: Sequence[str] = ("mlx-lm", "mlx")

    def __init__(self, target: TargetModel) -> None:
        """Load the model, and the draft model if there is one."""
        import mlx.core as mx

        self._target = target
        unchanged = target.files.engine == "mlx"
        self._model = _load(target.checkpoint, unchanged=unchanged)
        smaller = target.draft_checkpoint
        self._draft = None if smaller is None else _load(smaller, unchanged=unchanged)
        self.modes = (PLAIN,) if smaller is None else (PLAIN, DRAFT)
        drafting = {"draft_model": target.draft, "num_draft_tokens": _DRAFT_TOKENS}
        self.settings: Mapping[str, Any] = {
            "device": str(mx.default_device()),
            "weights": "the checkpoint's" if unchanged else f"{_BITS} bits, groups of {_GROUP}",
            **({} if smaller is None else drafting),
        }

    def answer(self, question: Question, max_tokens: int, mode: str) -> Answer:
        """See `Peer`."""
        answer: list[int] = []
        drafted: list[bool] = []
        began = first = perf_counter()
        for token, was_drafted in self._tokens(question.tokens, max_tokens, mode):
            if not answer:
                first = perf_counter()
            answer.append(token)
            drafted.append(was_drafted)
            if token in self._target.stops:
                break
        # Accepted draft tokens of a step come before its bonus token, all at the same time.
        at_first = drafted.index(False) + 1 if False in drafted else len(answer)
        ended = perf_counter()
        return self._target.answered(answer, first - began, ended - first, at_first=at_first)

    def _tokens(
        self, prompt: Sequence[int], max_tokens: int, mode: str
    ) -> Iterator[tuple[int, bool]]:
        """(token, whether it was drafted) of an answer."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step, speculative_generate_step

        ids = mx.array(list(prompt))
        if mode == PLAIN:
            for token, _ in generate_step(ids, self._model, max_tokens=max_tokens):
                yield int(token), False
            return
        for token, _, was_drafted in speculative_generate_step(
            ids, self._model, self._draft, num_draft_tokens=_DRAFT_TOKENS, max_tokens=max_tokens
        ):
            yield int(token), was_drafted


def _load(folder: Path, *, unchanged: bool) -> Any:
    from mlx import nn
    from mlx_lm.utils import load_model

    model = load_model(folder)[0]
    if not unchanged:
        nn.quantize(model, _GROUP, _BITS, class_predicate=_can_be_quantized)
    return model


def _can_be_quantized(_: str, layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % _GROUP == 0
