"""mlx-lm: plain decoding, and with a smaller model that drafts. It has no prompt lookup."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline.tools.bench.peers.base import Answer, Peer, Question
from paceline.tools.bench.peers.target import Target

PLAIN, DRAFT = "plain", "draft model"

_DRAFT_TOKENS = 3
"""As its command `mlx_lm.generate` has it by itself."""

_GROUP, _BITS = 64, 8
"""Weights as `mlx_lm.convert -q --q-bits 8` makes them, unless they are quantized already: about as
many bytes a token as paceline reads. Where paceline runs the checkpoint itself, so does mlx-lm."""


def open_peers(target: Target) -> list[Peer]:
    """mlx-lm.

    Raises:
        MissingExtra: what makes the Hugging Face form is not installed.
        ModelError: the model has none.
    """
    return [MlxLm(target)]


class MlxLm:
    """The model on the device that MLX chooses by itself."""

    name = "mlx-lm"
    packages: Sequence[str] = ("mlx-lm", "mlx")

    def __init__(self, target: Target) -> None:
        """Open it."""
        import mlx.core as mx

        self._target = target
        as_it_is = target.files.engine == "mlx"
        self._model = _load(target.checkpoint, as_it_is=as_it_is)
        smaller = target.draft_checkpoint
        self._draft = None if smaller is None else _load(smaller, as_it_is=as_it_is)
        self.ways = (PLAIN,) if smaller is None else (PLAIN, DRAFT)
        drafting = {"draft_model": target.draft, "num_draft_tokens": _DRAFT_TOKENS}
        self.settings: Mapping[str, Any] = {
            "device": str(mx.default_device()),
            "weights": "the checkpoint's" if as_it_is else f"{_BITS} bits, groups of {_GROUP}",
            **({} if smaller is None else drafting),
        }

    def answer(self, question: Question, max_tokens: int, way: str) -> Answer:
        """See `Peer`."""
        answer: list[int] = []
        drafted: list[bool] = []
        began = first = perf_counter()
        for token, was_drafted in self._tokens(question.tokens, max_tokens, way):
            if not answer:
                first = perf_counter()
            answer.append(token)
            drafted.append(was_drafted)
            if token in self._target.stops:
                break
        # A step's drafts that stood come before the token that it ends with, all at one time.
        at_first = drafted.index(False) + 1 if False in drafted else len(answer)
        ended = perf_counter()
        return self._target.answered(answer, first - began, ended - first, at_first=at_first)

    def _tokens(
        self, prompt: Sequence[int], max_tokens: int, way: str
    ) -> Iterator[tuple[int, bool]]:
        """Tokens, and whether each was drafted."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step, speculative_generate_step

        ids = mx.array(list(prompt))
        if way == PLAIN:
            for token, _ in generate_step(ids, self._model, max_tokens=max_tokens):
                yield int(token), False
            return
        for token, _, was_drafted in speculative_generate_step(
            ids,
            self._model,
            self._draft,
            num_draft_tokens=_DRAFT_TOKENS,
            max_tokens=max_tokens,
        ):
            yield int(token), was_drafted


def _load(folder: Path, *, as_it_is: bool) -> Any:
    from mlx import nn
    from mlx_lm.utils import load_model

    model = load_model(folder)[0]
    if not as_it_is:
        nn.quantize(model, _GROUP, _BITS, class_predicate=_can_be_quantized)
    return model


def _can_be_quantized(_: str, layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % _GROUP == 0
