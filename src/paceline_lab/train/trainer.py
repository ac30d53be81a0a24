"""The loop that trains a drafter: steps, evaluations on held-out answers, a state to resume from.

It does not know the network: a subclass computes the loss of a batch, evaluates and writes the
drafter. Invariant: a run that was stopped ends with the weights of one that was not.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.files import digest_of, write_json
from paceline_lab.train.answers import Answer, held_out
from paceline_lab.train.hidden_states import HiddenStates

STATE = "state.pt"
CURVE = "curve.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Hyperparameters of a run."""

    steps: int
    texts: int = 4
    """Texts per step."""
    rate: float = 1e-3
    warmup: float = 0.04
    """Share of the steps with a rising learning rate."""
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 1000
    """Steps between evaluations on held-out answers."""


class Text(NamedTuple):
    """An answer with its prompt, for training or evaluation."""

    tokens: Sequence[int]
    first: int
    """Position of the answer's first token."""
    number: int
    """Of the text in the hidden states."""


class Data(NamedTuple):
    """Texts to learn from and to evaluate on, and their hidden states."""

    training: list[Text]
    held_out: list[Text]
    states: HiddenStates

    def std(self, width: int) -> Tensor:
        """[width]: the standard deviation of the first hidden states of a row, of some texts.

        Without the first token of a text: as an attention sink it is hundreds of times as large.
        """
        texts = self.training[:: -(-len(self.training) // _EVALUATED)]
        rows = np.concatenate([self.states.of(text.number)[1:] for text in texts])
        return torch.from_numpy(rows[:, :width].astype(np.float32)).std(0).clamp(min=1e-6)


def split_answers(answers: Sequence[Answer], states: HiddenStates, shortest: int) -> Data:
    """Hold out one answer in twenty; answers of less than `shortest` tokens are left out.

    Raises InvalidRequest if there are too few.
    """
    texts = [
        Text(answer.tokens, len(answer.prompt), number)
        for number, answer in enumerate(answers)
        if len(answer.answer) >= shortest
    ]
    training, kept_back = held_out(texts)
    if not training or not kept_back:
        raise InvalidRequest(
            f"{len(texts)} of {len(answers)} answers have {shortest} tokens or more, too few to "
            "train and evaluate on; make more, or longer ones"
        )
    return Data(training, kept_back[:_EVALUATED], states)


class Trainer(ABC):
    """A training run."""

    def __init__(
        self,
        network: nn.Module,
        data: Data,
        *,
        about: Mapping[str, Any],
        schedule: Schedule,
        folder: Path,
        device: str,
    ) -> None:
        """Prepare a run, or resume that of `folder`.

        `about` is what a resumed run must have in common, beside texts and schedule. Raises
        InvalidRequest if the state in `folder` is of another run.
        """
        self._data, self._schedule = data, schedule
        self._folder, self._device = folder, device
        self._network = network
        self._optimizer = torch.optim.AdamW(
            network.parameters(),
            lr=schedule.rate,
            weight_decay=schedule.weight_decay,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self._over = 0.0
        self.curve: list[dict[str, float]] = []
        self._about = {**about, **self._identity()}
        self._resume()

    @abstractmethod
    def _loss(self, texts: list[Text], rng: np.random.Generator) -> Tensor:
        """The loss of a batch; `rng` is the same whenever the step is repeated."""

    @abstractmethod
    def measures(self) -> dict[str, float]:
        """What is measured on held-out answers: `tau`, tokens per target call, and others."""

    @abstractmethod
    def _write(self) -> None:
        """Write the drafter into the folder."""

    @abstractmethod
    def _amount(self) -> dict[str, float]:
        """How much was learnt from so far, for the curve."""

    def train(self, progress: Progress, over: Callable[[], float] = lambda: 0.0) -> float:
        """Train to the end of the schedule; return the last tau.

        `over` is the share of the time that is over, for a run that may not reach its last step:
        the schedule is then as far, and ends at 1. Every evaluation saves the drafter and the
        state; there is one at the end.
        """
        schedule = self._schedule
        batches = self._batches()
        with progress.task("training", schedule.steps, unit="steps") as update:
            losses = []
            while self.step < schedule.steps:
                self._over = over()
                losses.append(self._train_step(next(batches)))
                self.step += 1
                update(self.step)
                ended = self.step == schedule.steps or over() >= 1
                if ended or self.step % schedule.evaluate_every == 0:
                    measured = self.measures()
                    self._write()
                    self._save(float(np.mean(losses)), measured)
                    losses = []
                    progress.say(
                        f"step {self.step}: loss {self.curve[-1]['loss']:.3f}, "
                        f"tau {measured['tau']:.3f}"
                    )
                if ended:
                    break
        return self.curve[-1]["tau"] if self.curve else 1.0

    def _train_step(self, texts: list[Text]) -> float:
        """Take an optimizer step; return the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        rng = np.random.default_rng((self._schedule.seed, self.step))
        # Dropout is the same in a step that a resumed run repeats.
        torch.manual_seed(int(rng.spawn(1)[0].integers(2**62)))
        loss = self._loss(texts, rng)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), self._schedule.clip)
        self._optimizer.step()
        return float(loss.detach())

    def _states_of(self, texts: Sequence[Text]) -> list[Tensor]:
        """Recorded hidden states of texts, [tokens, width] float32 a text."""
        return [
            torch.from_numpy(self._data.states.of(text.number).astype(np.float32)).to(self._device)
            for text in texts
        ]

    def _batches(self) -> Iterator[list[Text]]:
        """Batches of texts of similar length; a resumed run has the same order."""
        training, size = self._data.training, self._schedule.texts
        per_epoch = max(len(training) // size, 1)
        while True:
            epoch = self.step // per_epoch
            rng = np.random.default_rng((self._schedule.seed, 7, epoch))
            noise = rng.uniform(0.8, 1.25, len(training))
            lengths = [len(text.tokens) for text in training]
            order = np.argsort(np.array(lengths) * noise)[: per_epoch * size]
            for number in rng.permutation(per_epoch)[self.step % per_epoch :]:
                yield [training[i] for i in order[number * size : (number + 1) * size]]

    def _done(self, first: float = 0.0) -> float:
        """The share that is over of the steps from `first` on, or of the time if that is more."""
        steps = (self.step - first) / max(self._schedule.steps - first, 1)
        return min(max(steps, self._over), 1.0)

    def _learning_rate(self) -> float:
        """Linear warmup, then cosine decay to a tenth."""
        schedule = self._schedule
        rise = max(schedule.warmup * schedule.steps, 1)
        if self.step < rise:
            return schedule.rate * (self.step + 1) / rise
        done = self._done(rise)
        return schedule.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def _save(self, loss: float, measured: Mapping[str, float]) -> None:
        """Save the state and an evaluation of the curve."""
        self.curve.append({"step": self.step, **self._amount(), "loss": loss, **measured})
        state = {
            "run": self._about,
            "step": self.step,
            "curve": self.curve,
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        temporary = self._folder / f".{STATE}"
        torch.save(state, temporary)
        temporary.replace(self._folder / STATE)
        write_json(self._folder / CURVE, {**self._about, "curve": self.curve})

    def _identity(self) -> dict[str, Any]:
        """Texts and schedule of the run; its length may change."""
        schedule = asdict(self._schedule)
        del schedule["steps"], schedule["evaluate_every"]
        texts = [(text.first, *text.tokens) for text in self._data.training]
        return {"texts": f"{len(texts)}, {digest_of(texts)}", "schedule": schedule}

    def _resume(self) -> None:
        path = self._folder / STATE
        if not path.exists():
            return
        state = torch.load(path, map_location=self._device, weights_only=True)
        if state["run"] != self._about:
            run = state["run"]
            differing = [key for key, value in self._about.items() if run.get(key) != value]
            raise InvalidRequest(
                f"{path} is of a run with another {', '.join(differing)}; choose another folder, "
                "or the settings it was begun with"
            )
        self.step, self.curve = state["step"], state["curve"]
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])


_EVALUATED = 40
"""Held-out answers that are evaluated on."""


def mean_tokens_kept(accepted: Sequence[Sequence[int]]) -> float:
    """Tau: mean tokens per target call, with a draft after every call.

    `accepted` has the accepted draft tokens at every position of an answer, answer by answer.
    """
    kept = calls = 0
    for answer in accepted:
        at = 0
        while at < len(answer):
            kept += answer[at] + 1
            calls += 1
            at += answer[at] + 1
    return kept / max(calls, 1)
