"""Trains a head for multi-token prediction (MTP) of EAGLE-3's network, on the target's answers.

The loss is cross-entropy to the target's distribution over the tokens to draft, in several draft
steps: in each but the first, the head reads its own last output, as it does when it drafts. Later
steps weigh less.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from paceline.drafters.mtp import HeadConfig
from paceline.storage.files import digest_of
from paceline_lab.train import trainer
from paceline_lab.train.answers import Answer
from paceline_lab.train.forms import HeadForm
from paceline_lab.train.hidden_states import HiddenStates
from paceline_lab.train.mtp_network import HeadNetwork, Rows
from paceline_lab.train.target_tensors import TargetTensors
from paceline_lab.train.trainer import Text, mean_tokens_kept, split_answers

_DECAY = 0.8
"""Weight of a draft step, relative to the step before (EAGLE-3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(trainer.Schedule):
    """Hyperparameters of a run."""

    depth: int = 4
    """Draft steps that are trained and evaluated."""
    shallow: float = 0.5
    """Share of the run that trains the first draft step alone."""
    dropout: float = 0.1


class Trainer(trainer.Trainer):
    """A training run."""

    def __init__(
        self,
        config: HeadConfig,
        shared: TargetTensors,
        *,
        hidden_states: HiddenStates,
        answers: Sequence[Answer],
        form: HeadForm,
        schedule: Schedule,
        folder: Path,
        device: str = "cpu",
    ) -> None:
        """Prepare to train on `answers`, whose `hidden_states` are in the same order.

        They are as `form.recorded` returns them. One answer in twenty is held out. A state in
        `folder` is resumed. Raises InvalidRequest if there are too few answers, or the state in
        `folder` is of another run.
        """
        data = split_answers(answers, hidden_states, schedule.depth + 1)
        self._config, self._shared, self._steps = config, shared, schedule
        self._form = form
        torch.manual_seed(schedule.seed)
        std = data.std(config.tapped_size)
        self.network = HeadNetwork(config, std, dropout=schedule.dropout).to(device)
        with torch.no_grad():
            self.network.lm_head.weight.copy_(shared.head.float())
        drafted = shared.drafted.tolist()
        about = {
            "head": asdict(config),
            "drafted_tokens": f"{len(drafted)}, {digest_of(drafted)}",
        }
        super().__init__(
            self.network, data, about=about, schedule=schedule, folder=folder, device=device
        )

    def measures(self) -> dict[str, float]:
        """`tau`, and `named_1` to `named_n` on held-out answers.

        `named_k` is the share of positions whose k-th draft token is right if those before it are;
        tokens that are never drafted count as wrong.
        """
        self.network.eval()
        depth = self._steps.depth
        accepted, right_counts, position_counts = [], np.zeros(depth), np.zeros(depth)
        for text in self._data.held_out:
            is_right, has_token = self._right(text)
            right_counts += is_right.sum(0)
            position_counts += has_token.sum(0)
            accepted.append(is_right.cumprod(1).sum(1).tolist())
        self.network.train()
        shares = {
            f"named_{step + 1}": float(right_counts[step] / position_counts[step])
            for step in range(depth)
        }
        return {"tau": mean_tokens_kept(accepted), **shares}

    def _loss(self, texts: list[Text], rng: np.random.Generator) -> Tensor:
        steps = self._depth()
        states = self._states_of(texts)
        kind = self._device.partition(":")[0]
        with torch.autocast(kind, torch.bfloat16, enabled=_has_bf16(kind)):
            step_logits = self.network(self._rows(texts, states), steps)
        pairs = zip(texts, states, strict=True)
        labels = [self._labels(text, rows) for text, rows in pairs]
        losses = []
        for step, logits in enumerate(step_logits):
            shares = torch.cat([F.pad(rows[step:], (0, 0, 0, step)) for rows in labels])
            wrong = F.cross_entropy(logits.float(), shares, reduction="sum")
            losses.append(_DECAY**step * wrong / shares.sum().clamp(min=1))
        return torch.stack(losses).sum() / sum(_DECAY**step for step in range(steps))

    def _depth(self) -> int:
        """Draft steps that this step trains."""
        return 1 if self._done() < self._steps.shallow else self._steps.depth

    def _right(self, text: Text) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Whether a draft token is right, and whether the text has one there: both [m, depth]."""
        is_right, has_token = [], []
        with torch.no_grad():
            rows = self._rows([text], self._states_of([text]))
            step_logits = self.network(rows, self._steps.depth)
        for step, logits in enumerate(step_logits):
            truth = np.array(text.tokens[text.first + 1 + step :])
            draft = self._shared.drafted[logits.argmax(-1)].cpu().numpy()
            in_text = np.arange(len(draft)) < len(truth)
            has_token.append(in_text)
            is_right.append(in_text & (draft == np.pad(truth, (0, len(draft) - len(truth)))))
        return np.stack(is_right, axis=1), np.stack(has_token, axis=1)

    def _rows(self, texts: Sequence[Text], states: Sequence[Tensor]) -> list[Rows]:
        """Rows of texts: of all tokens that are read but the last, which no row predicts from."""
        inputs = []
        for text, rows in zip(texts, states, strict=True):
            start = 0 if self._form.reads_prompts else text.first - 1
            tokens = torch.tensor(text.tokens[start:], device=self._device)
            read = rows[start:-1, : self._config.tapped_size]
            inputs.append(Rows(read, self._shared.embeddings[tokens], text.first - 1 - start))
        return inputs

    def _labels(self, text: Text, states: Tensor) -> Tensor:
        """[m, drafted]: the target's distribution of what the rows predict in the first step.

        Zeros where the token is one that is not drafted.
        """
        last = states[text.first : -1, -self._config.hidden_size :]
        logits = torch.from_numpy(self._form.labels(last.cpu().numpy())).to(self._device)
        answer_ids = torch.tensor(text.tokens[text.first + 1 :], device=self._device)
        return logits.softmax(-1) * (self._shared.column[answer_ids] >= 0)[:, None]

    def _write(self) -> None:
        self._form.save(self.network.weights(), self._folder)

    def _amount(self) -> dict[str, float]:
        return {"texts": self.step * self._steps.texts}


def _has_bf16(kind: str) -> bool:
    """Whether a device computes in bf16. Many CPUs only emulate it, ten times as slow as f32."""
    return kind != "cpu" or bool(torch.cpu._is_avx512_bf16_supported())
