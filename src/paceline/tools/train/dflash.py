"""Trains a DFlash drafter: blocks of mask tokens at random anchors in the target's answers.

The loss is cross-entropy plus the distance of a final hidden state from the target's own at that
token (EAGLE, arXiv 2401.15077), which has more information than the token alone. Positions weigh
less the further they are from their anchor: early ones decide how many are accepted. A stopped run
continues from its saved state. At intervals it evaluates tau, tokens per target call, on held-out
answers.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from paceline.drafters.dflash import Config
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.storage.files import digest_of, write_json
from paceline.tools.train.answers import Answer, held_out
from paceline.tools.train.checkpoint import save_checkpoint
from paceline.tools.train.hidden_states import HiddenStates
from paceline.tools.train.network import Network

STATE = "state.pt"
CURVE = "curve.json"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hyperparameters of a run."""

    steps: int
    texts: int = 4
    """Texts per step."""
    anchors: int = 8
    """Blocks per text and step."""
    gamma: float = 2.0
    """Positions over which the loss weight falls to 1/e (DFlash: 4 for blocks of 8)."""
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


class TargetTensors(NamedTuple):
    """The target's tensors that the drafter uses."""

    embeddings: Tensor
    """[vocab, d]"""
    head: Tensor
    """[drafted, d] bf16: rows of the head for the tokens to draft."""
    column: Tensor
    """[vocab]: a token's index in `drafted`; -1: not drafted."""
    drafted: Tensor
    """[drafted]: token ids."""


def share_weights(
    embeddings: npt.NDArray[np.float32],
    head: npt.NDArray[np.float32],
    draft_vocab: Sequence[int] | None,
    device: str,
) -> TargetTensors:
    """Copy the target's matrices to the device; `draft_vocab` None drafts all tokens."""
    vocab = len(embeddings)
    drafted = torch.arange(vocab) if draft_vocab is None else torch.tensor(list(draft_vocab))
    column = torch.full((vocab,), -1)
    column[drafted] = torch.arange(len(drafted))
    rows = torch.from_numpy(head)[drafted]
    return TargetTensors(
        torch.from_numpy(embeddings).to(device),
        rows.to(device, torch.bfloat16),
        column.to(device),
        drafted.to(device),
    )


class Trainer:
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
        texts = [
            Text(answer.tokens, len(answer.prompt), number)
            for number, answer in enumerate(answers)
            if len(answer.answer) >= config.block_size
        ]
        self._training, kept_back = held_out(texts)
        self._held_out = kept_back[:_EVALUATED]
        if not self._training or not self._held_out:
            raise InvalidRequest(
                f"{len(texts)} of {len(answers)} answers have a block of {config.block_size} "
                "tokens, too few to train and evaluate on; make more, or longer ones"
            )
        self._config, self._shared, self._states = config, shared, hidden_states
        self._schedule, self._folder, self._device = schedule, folder, device
        torch.manual_seed(schedule.seed)
        self.network = Network(config, self._std()).to(device)
        self._optimizer = torch.optim.AdamW(
            self.network.parameters(),
            lr=schedule.rate,
            weight_decay=schedule.weight_decay,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.step = 0
        self.curve: list[dict[str, float]] = []
        places = torch.arange(config.block_size - 1, device=device)
        self._weights = torch.exp(-places / schedule.gamma)
        self._about = self._identity()
        self._resume()

    def run(self, progress: Progress, draft_vocab: Sequence[int] | None) -> float:
        """Train to the end of the schedule; return the last tau.

        Every evaluation saves the drafter and the state.
        """
        schedule = self._schedule
        batches = self._batches()
        tau = self.curve[-1]["tau"] if self.curve else 1.0
        with progress.task("training", schedule.steps, unit="steps") as update:
            losses = []
            while self.step < schedule.steps:
                losses.append(self._train_step(next(batches)))
                self.step += 1
                update(self.step)
                if self.step % schedule.evaluate_every == 0 or self.step == schedule.steps:
                    tau = self.evaluate()
                    weights = self.network.weights()
                    save_checkpoint(weights, self._config, self._folder, draft_vocab=draft_vocab)
                    self._save(float(np.mean(losses)), tau)
                    losses = []
                    progress.say(
                        f"step {self.step}: loss {self.curve[-1]['loss']:.3f}, tau {tau:.3f}"
                    )
        return tau

    def evaluate(self) -> float:
        """Tau: mean tokens per target call when drafting through each held-out answer."""
        self.network.eval()
        kept = calls = 0
        for text in self._held_out:
            with torch.no_grad():
                accepted = self._accepted(text)
            at = 0
            while at < len(accepted):
                kept += accepted[at] + 1
                calls += 1
                at += accepted[at] + 1
        self.network.train()
        return kept / calls

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

    def _train_step(self, texts: list[Text]) -> float:
        """Take an optimizer step; return the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        block = self._config.block_size
        rng = np.random.default_rng((self._schedule.seed, self.step))
        count = self._schedule.anchors
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
        loss = loss + _DISTANCE_WEIGHT * _mean(
            self._distance(hidden, rows, places), self._weights * known
        )
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self._schedule.clip)
        self._optimizer.step()
        return float(loss.detach())

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
        longest = max(len(text.tokens) for text in texts)
        rows = torch.zeros(len(texts), longest, self._states.width)
        for row, text in zip(rows, texts, strict=True):
            found = torch.from_numpy(self._states.of(text.number).astype(np.float32))
            row[: len(found)] = found
        return rows.to(self._device)

    def _std(self) -> Tensor:
        """[taps * d]: the standard deviation of tapped hidden states, of some texts.

        Without the first token of a text: as an attention sink it is hundreds of times as large.
        """
        some = self._training[:: -(-len(self._training) // _EVALUATED)]
        rows = np.concatenate([self._states.of(text.number)[1:] for text in some])
        seen = torch.from_numpy(rows[:, : self._config.tapped_size].astype(np.float32))
        return seen.std(0).clamp(min=1e-6)

    def _batches(self) -> Iterator[list[Text]]:
        """Batches of texts of similar length; a resumed run has the same order."""
        size = self._schedule.texts
        per_epoch = max(len(self._training) // size, 1)
        while True:
            epoch = self.step // per_epoch
            rng = np.random.default_rng((self._schedule.seed, 7, epoch))
            noise = rng.uniform(0.8, 1.25, len(self._training))
            lengths = [len(text.tokens) for text in self._training]
            order = np.argsort(np.array(lengths) * noise)[: per_epoch * size]
            for number in rng.permutation(per_epoch)[self.step % per_epoch :]:
                yield [self._training[i] for i in order[number * size : (number + 1) * size]]

    def _learning_rate(self) -> float:
        """Linear warmup, then cosine decay to a tenth."""
        schedule = self._schedule
        rise = max(schedule.warmup * schedule.steps, 1)
        if self.step < rise:
            return schedule.rate * (self.step + 1) / rise
        done = (self.step - rise) / max(schedule.steps - rise, 1)
        return schedule.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def _save(self, loss: float, tau: float) -> None:
        """Save the state and an evaluation of the curve."""
        per_step = self._schedule.texts * self._schedule.anchors
        blocks = self.step * per_step
        self.curve.append({"step": self.step, "blocks": blocks, "loss": loss, "tau": tau})
        state = {
            "run": self._about,
            "step": self.step,
            "curve": self.curve,
            "network": self.network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        beside = self._folder / f".{STATE}"
        torch.save(state, beside)
        beside.replace(self._folder / STATE)
        write_json(self._folder / CURVE, {**self._about, "curve": self.curve})

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must have in common; its length may change."""
        schedule = asdict(self._schedule)
        del schedule["steps"], schedule["evaluate_every"]
        drafted = self._shared.drafted.tolist()
        texts = [(text.first, *text.tokens) for text in self._training]
        return {
            "drafter": asdict(self._config),
            "drafted_tokens": f"{len(drafted)}, {digest_of(drafted)}",
            "texts": f"{len(texts)}, {digest_of(texts)}",
            "schedule": schedule,
        }

    def _resume(self) -> None:
        path = self._folder / STATE
        if not path.exists():
            return
        state = torch.load(path, map_location=self._device, weights_only=True)
        if state["run"] != self._about:
            here = state["run"]
            differing = [key for key, value in self._about.items() if here.get(key) != value]
            raise InvalidRequest(
                f"{path} is of a run with another {', '.join(differing)}; choose another folder, "
                "or the settings it was begun with"
            )
        self.step, self.curve = state["step"], state["curve"]
        self.network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])


_EVALUATED = 40
"""Held-out answers that tau is measured on."""

_BLOCKS_PER_CALL = 128

_DISTANCE_WEIGHT = 10.0
"""Weight of the distance of hidden states; about half the loss."""


def _places(text: Text, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Random anchors in the answer, without repetition if it is long enough."""
    room = len(text.tokens) - 1 - text.first
    return text.first + rng.choice(room, count, replace=room < count)


def most_frequent(answers: Sequence[Answer], count: int) -> list[int]:
    """The `count` most frequent tokens of answers, ascending."""
    tokens = np.concatenate([answer.answer for answer in answers])
    counts = np.bincount(tokens)
    order = np.argsort(-counts, kind="stable")[:count]
    return sorted(order[counts[order] > 0].tolist())


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1)
