"""transformers: plain decoding, and its prompt lookup."""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from paceline_lab.peers.base import Answer, Peer, Question
from paceline_lab.peers.target import TargetModel

PLAIN, LOOKUP = "plain", "lookup"

_DRAFT_TOKENS = 5
"""From its guide to assisted decoding."""


def open_peers(target: TargetModel) -> list[Peer]:
    """Transformers.

    Raises:
        MissingExtra: a package that makes the Hugging Face checkpoint is not installed.
        ModelError: the model has no checkpoint.
    """
    return [Transformers(target)]


class Transformers:
    """The model with transformers' default settings, on the CPU."""

    name = "transformers"
    packages: Sequence[str] = ("transformers", "torch")
    modes = (PLAIN, LOOKUP)

    def __init__(self, target: TargetModel) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        if target.threads is not None:
            torch.set_num_threads(target.threads)
        self._target = target
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            target.checkpoint, local_files_only=True
        )
        self.settings: Mapping[str, Any] = {
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "prompt_lookup_num_tokens": _DRAFT_TOKENS,
            "threads": torch.get_num_threads(),
        }

    def answer(self, question: Question, max_tokens: int, mode: str) -> Answer:
        """See `Peer`."""
        import torch
        from transformers import GenerationConfig

        stops = self._target.stops
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(stops),
            pad_token_id=stops[0],
            prompt_lookup_num_tokens=_DRAFT_TOKENS if mode == LOOKUP else None,
        )
        ids = torch.tensor([list(question.tokens)])
        times = _Times()
        began = perf_counter()
        output_ids = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=times
        )
        ended = perf_counter()
        answer = output_ids[0, len(question.tokens) :].tolist()
        first, at_first = times.first
        return self._target.answered(answer, first - began, ended - first, at_first=at_first)


class _Times:
    """A streamer that measures when tokens arrive: first the prompt, then those of every step."""

    def __init__(self) -> None:
        self._puts: list[tuple[float, int]] = []

    @property
    def first(self) -> tuple[float, int]:
        """(time, number of tokens) of the first step."""
        return self._puts[1]

    def put(self, tokens: Any) -> None:
        """Note the tokens of a step."""
        if len(self._puts) < 2:
            self._puts.append((perf_counter(), tokens.numel()))

    def end(self) -> None:
        """Required of a streamer."""
