"""mlx-lm: plain decoding, and a smaller draft model. It has no prompt lookup."""

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

from paceline.errors import MissingExtra
from paceline_lab.peers.base import NotComparable, PeerAnswer, Question, TargetModel

PLAIN, DRAFT = "plain", "draft model"

_DRAFT_TOKENS = 3
"""Default of its command `mlx_lm.generate`."""


class MlxLm:
    """The model on MLX's default device."""

    name = "mlx-lm"
    packages: Sequence[str] = ("mlx-lm", "mlx")

    def __init__(self, target: TargetModel) -> None:
        """Load the model, and the draft model if there is one.

        Raises:
            NotComparable: paceline does not run the checkpoint itself, in MLX too.
            MissingExtra: mlx-lm is not installed.
        """
        for files in filter(None, (target.files, target.draft)):
            if files.engine != "mlx":
                raise NotComparable(
                    f"{files.name} is for the engine {files.engine}, and mlx-lm runs what the "
                    "engine mlx does: a folder with config.json and safetensors"
                )
        try:
            import mlx.core as mx
            from mlx_lm.utils import load_model
        except ImportError as error:
            raise MissingExtra("mlx-lm is not installed here: pip install mlx-lm") from error

        self._target = target
        self._model = load_model(target.files.folder)[0]
        self._draft = None if target.draft is None else load_model(target.draft.folder)[0]
        self.modes: Sequence[str] = (PLAIN,) if target.draft is None else (PLAIN, DRAFT)
        drafting = (
            {}
            if target.draft is None
            else {"draft_model": target.draft.name, "num_draft_tokens": _DRAFT_TOKENS}
        )
        self.settings: Mapping[str, Any] = {"device": str(mx.default_device()), **drafting}

    def answer(self, question: Question, max_tokens: int, mode: str) -> PeerAnswer:
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
