"""Trains a DFlash drafter: blocks of mask tokens at random anchors in the target's answers.

The loss is cross-entropy plus the distance of a final hidden state from the target's own at that
token (EAGLE, arXiv 2401.15077), which has more information than the token alone. Positions weigh
less the further they are from their anchor: early ones decide how many are accepted.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from paceline.drafters.dflash import Config
from paceline.models import Progress
from paceline.storage.files import digest_of
from paceline.tools.train import trainer
from paceline.tools.train.answers import Answer
from paceline.tools.train.checkpoint import save_checkpoint
from paceline.tools.train.hidden_states import HiddenStates
from paceline.tools.train.network import Network
from paceline.tools.train.target_tensors import TargetTensors
from paceline.tools.train.trainer import Text, mean_tokens_kept, split_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(trainer.Schedule):
    """Hyperparameters of a run."""

    anchors: int = 8
    """Blocks per text and step."""
    gamma: float = 2.0
    """Positions over which the loss weight falls to 1/e (DFlash: 4 for blocks of 8)."""


class Trainer(trainer.Trainer):
    """A training run."""

    def __init__(
        self,
        config: Config,
        shared: TargetTensors,
        *,
        hidden_states: HiddenStates,
        answers: Sequence[Answer],
        schedule: Schedule,
        folder: Path,
        device: str = "cpu",
    ) -> None:
        """Prepare to train on `answers`, whose `hidden_states` are in the same order.

        A row has the drafter's taps first and the target's last layer at its end. One answer in
        twenty is held out. A state in `folder` is resumed. Raises InvalidRequest if there are too
        few answers, or the state in `folder` is of another run.
        """
        data = split_answers(answers, hidden_states, config.block_size)
        self._config, self._shared, self._blocks = config, shared, schedule
        self._draft_vocab: Sequence[int] | None = None
        torch.manual_seed(schedule.seed)
        self.network = Network(config, data.std(config.tapped_size)).to(device)
        places = torch.arange(config.block_size - 1, device=device)
        self._weights = torch.exp(-places / schedule.gamma)
        drafted = shared.drafted.tolist()
        about = {
            "drafter": asdict(config),
            "drafted_tokens": f"{len(drafted)}, {digest_of(drafted)}",
        }
        super().__init__(
            self.network, data, about=about, schedule=schedule, folder=folder, device=device
        )

    def run(self, progress: Progress, draft_vocab: Sequence[int] | None) -> float:
        """Train to the end of the schedule; return the last tau."""
        self._draft_vocab = draft_vocab
        return self.train(progress)

    def measures(self) -> dict[str, float]:
        """Tau on held-out answers."""
        self.network.eval()
        with torch.no_grad():
            accepted = [self._accepted(text) for text in self._data.held_out]
        self.network.train()
        return {"tau": mean_tokens_kept(accepted)}

    def _write(self) -> None:
        save_checkpoint(
            self.network.weights(), self._config, self._folder, draft_vocab=self._draft_vocab
        )

    def _amount(self) -> dict[str, float]:
        return {"blocks": self.step * self._blocks.texts * self._blocks.anchors}

    def _accepted(self, text: Text) -> list[int]:
        """Accepted draft tokens of a block at each position of an answer."""
        block = self._config.block_size
        found: list[int] = []
        rows = self._rows([text])
        for first in range(text.first, len(text.tokens) - 1, _BLOCKS_PER_CALL):
            anchors = range(first, min(first + _BLOCKS_PER_CALL, len(text.tokens) - 1))
            hidden = self._hidden(rows, [text], torch.tensor([list(anchors)]))
            logits = F.linear(hidden, self._shared.head)
            drafts = self._shared.drafted[logits[0].argmax(-1)].cpu().numpy()
            for anchor, draft in zip(anchors, drafts, strict=True):
                truth = np.array(text.tokens[anchor + 1 : anchor + block])
                same = draft[: len(truth)] == truth
                found.append(int(same.cumprod().sum()))
        return found

    def _loss(self, texts: list[Text], rng: np.random.Generator) -> Tensor:
        block, count = self._config.block_size, self._blocks.anchors
        anchors = torch.tensor(np.array([np.sort(_places(text, count, rng)) for text in texts]))
        # Positions after the end of a text have no target token and no weight.
        longest = max(len(text.tokens) for text in texts) + block
        truth = torch.full((len(texts), longest), -1)
        for row, text in zip(truth, texts, strict=True):
            row[: len(text.tokens)] = torch.tensor(text.tokens)
        places = anchors[..., None] + torch.arange(1, block)
        targets = truth.gather(1, places.flatten(1)).view(places.shape).to(self._device)
        known = targets >= 0
        targets = torch.where(known, self._shared.column[targets], -1)
        rows = self._rows(texts)
        hidden = self._hidden(rows, texts, anchors)
        logits = F.linear(hidden, self._shared.head)
        wrong = F.cross_entropy(
            logits.flatten(0, 2).float(), targets.flatten(), ignore_index=-1, reduction="none"
        )
        loss = _mean(wrong.view(targets.shape), self._weights * (targets >= 0))
        return loss + _DISTANCE_WEIGHT * _mean(
            self._distance(hidden, rows, places), self._weights * known
        )

    def _distance(self, hidden: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """[S, A, B - 1]: distance of `hidden` from the target's states that predict `places`."""
        own = rows[..., -self._config.hidden_size :]
        own = F.rms_norm(own, own.shape[-1:]) * self.network.norm.weight.detach()
        before = (places - 1).clamp(max=own.shape[1] - 1).to(own.device)
        own = own[torch.arange(len(own), device=own.device)[:, None, None], before]
        return F.smooth_l1_loss(hidden.float(), own, reduction="none").mean(-1)

    def _hidden(self, rows: Tensor, texts: Sequence[Text], anchors: Tensor) -> Tensor:
        """[S, A, B - 1, d] bf16: final hidden states of draft tokens of blocks at `anchors`."""
        config = self._config
        tokens = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
        for row, text, places in zip(tokens, texts, anchors, strict=True):
            row[:, 0] = torch.tensor(text.tokens)[places]
        embedded = self._shared.embeddings[tokens.to(self._device)]
        tapped = rows[..., : config.tapped_size]
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16):
            hidden: Tensor = self.network(tapped, embedded, anchors.to(self._device))
        return hidden[:, :, 1:].bfloat16()

    def _rows(self, texts: Sequence[Text]) -> Tensor:
        """Recorded hidden states of texts, [S, L, width], padded at the end."""
        return nn.utils.rnn.pad_sequence(self._states_of(texts), batch_first=True)


_BLOCKS_PER_CALL = 128

_DISTANCE_WEIGHT = 10.0
"""Weight of the distance of hidden states; about half the loss."""


def _places(text: Text, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Random anchors in the answer, without repetition if it is long enough."""
    room = len(text.tokens) - 1 - text.first
    return text.first + rng.choice(room, count, replace=room < count)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1)
