"""Training a DFlash drafter: blocks of masks at random anchors in the target's answers.

The loss is cross-entropy, and how far a final hidden state is from the target's own at that
token (EAGLE, arXiv 2401.15077), which says more than the one right token. A place counts less the
further it is from its anchor: early ones decide how many are accepted. The run keeps its state in a
checkpoint and goes on from there; now and then it measures tau, tokens kept per verify call, on
answers it does not learn from.
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
from paceline.tools.train.features import Features
from paceline.tools.train.network import Network

STATE = "state.pt"
CURVE = "curve.json"


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast to learn."""

    steps: int
    texts: int = 4
    """Texts in a step."""
    anchors: int = 8
    """Blocks of a text in a step."""
    gamma: float = 2.0
    """Places in which the weight of a place falls to 1/e (DFlash: 4 for blocks of 8)."""
    rate: float = 1e-3
    warmup: float = 0.04
    """Share of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 1000
    """Steps between looks at how it does on held-out answers."""


class Text(NamedTuple):
    """A text to learn from or to look at."""

    tokens: Sequence[int]
    first: int
    """Where its answer begins."""
    place: int
    """Its place among the features."""


class FromTarget(NamedTuple):
    """What a drafter has from its target."""

    embeddings: Tensor
    """[vocab, d]"""
    head: Tensor
    """[drafted, d] bf16: the rows of the head for the tokens that are drafted."""
    column: Tensor
    """[vocab]: a token's place among the drafted ones; -1 where it is none."""
    drafted: Tensor
    """[drafted]: the tokens."""


def share(
    embeddings: npt.NDArray[np.float32],
    head: npt.NDArray[np.float32],
    draft_vocab: Sequence[int] | None,
    device: str,
) -> FromTarget:
    """Put the target's matrices where the training is; `draft_vocab` None drafts all tokens."""
    vocab = len(embeddings)
    drafted = torch.arange(vocab) if draft_vocab is None else torch.tensor(list(draft_vocab))
    column = torch.full((vocab,), -1)
    column[drafted] = torch.arange(len(drafted))
    rows = torch.from_numpy(head)[drafted]
    return FromTarget(
        torch.from_numpy(embeddings).to(device),
        rows.to(device, torch.bfloat16),
        column.to(device),
        drafted.to(device),
    )


class Trainer:
    """One run; see the top of this file."""

    def __init__(
        self,
        config: Config,
        shared: FromTarget,
        *,
        features: Features,
        answers: Sequence[Answer],
        schedule: Schedule,
        folder: Path,
        device: str = "cpu",
    ) -> None:
        """Prepare to learn from `answers`, whose `features` are in the same order.

        A row of `features` begins with what the drafter sees and ends with the target's last layer.
        One answer in twenty is kept back to look at. A state in `folder` is taken up.

        Raises:
            InvalidRequest: there are too few answers, or the state in `folder` is of another run.
        """
        texts = [
            Text(answer.tokens, len(answer.prompt), place)
            for place, answer in enumerate(answers)
            if len(answer.answer) >= config.block_size
        ]
        self._learnt, kept_back = held_out(texts)
        self._held_out = kept_back[:_LOOKED_AT]
        if not self._learnt or not self._held_out:
            raise InvalidRequest(
                f"{len(texts)} of {len(answers)} answers have a block of {config.block_size} "
                "tokens, too few to learn from and to look at; make more, or longer ones"
            )
        self._config, self._shared, self._features = config, shared, features
        self._schedule, self._folder, self._device = schedule, folder, device
        torch.manual_seed(schedule.seed)
        self.network = Network(config, self._spread()).to(device)
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
        self._about = self._about_run()
        self._resume()

    def run(self, progress: Progress, draft_vocab: Sequence[int] | None) -> float:
        """Learn to the end of the schedule, or on from the state; returns the last tau.

        The drafter is written whenever it was looked at, so a run that is stopped leaves one.
        """
        schedule = self._schedule
        batches = self._batches()
        tau = self.curve[-1]["tau"] if self.curve else 1.0
        with progress.task("training", schedule.steps, unit="steps") as reach:
            losses = []
            while self.step < schedule.steps:
                losses.append(self._learn(next(batches)))
                self.step += 1
                reach(self.step)
                if self.step % schedule.evaluate_every == 0 or self.step == schedule.steps:
                    tau = self.evaluate()
                    weights = self.network.weights()
                    save_checkpoint(weights, self._config, self._folder, draft_vocab=draft_vocab)
                    self._note(float(np.mean(losses)), tau)
                    losses = []
                    progress.say(
                        f"step {self.step}: loss {self.curve[-1]['loss']:.3f}, tau {tau:.3f}"
                    )
        return tau

    def evaluate(self) -> float:
        """Tau on held-out answers: tokens a verify call would keep, walking through each answer."""
        self.network.eval()
        kept = calls = 0
        for text in self._held_out:
            with torch.no_grad():
                stood = self._accepted(text)
            at = 0
            while at < len(stood):
                kept += stood[at] + 1
                calls += 1
                at += stood[at] + 1
        self.network.train()
        return kept / calls

    def _accepted(self, text: Text) -> list[int]:
        """For each place of an answer, how many drafts of a block that begins there stand."""
        block = self._config.block_size
        found: list[int] = []
        features = self._rows([text])
        for first in range(text.first, len(text.tokens) - 1, _BLOCKS_AT_ONCE):
            anchors = range(first, min(first + _BLOCKS_AT_ONCE, len(text.tokens) - 1))
            hidden = self._hidden(features, [text], torch.tensor([list(anchors)]))
            logits = F.linear(hidden, self._shared.head)
            drafts = self._shared.drafted[logits[0].argmax(-1)].cpu().numpy()
            for anchor, draft in zip(anchors, drafts, strict=True):
                truth = np.array(text.tokens[anchor + 1 : anchor + block])
                same = draft[: len(truth)] == truth
                found.append(int(same.cumprod().sum()))
        return found

    def _learn(self, texts: list[Text]) -> float:
        """One step of the optimizer; returns the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        block = self._config.block_size
        rng = np.random.default_rng((self._schedule.seed, self.step))
        count = self._schedule.anchors
        anchors = torch.tensor(np.array([np.sort(_places(text, count, rng)) for text in texts]))
        # Behind a text's end nothing is known: those positions do not count.
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
        loss = loss + _AWAY * _mean(self._away(hidden, rows, places), self._weights * known)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), self._schedule.clip)
        self._optimizer.step()
        return float(loss.detach())

    def _away(self, hidden: Tensor, rows: Tensor, places: Tensor) -> Tensor:
        """[S, A, B - 1]: how far `hidden` is from what the target had where it chose `places`."""
        own = rows[..., -self._config.hidden_size :]
        own = F.rms_norm(own, own.shape[-1:]) * self.network.norm.weight.detach()
        before = (places - 1).clamp(max=own.shape[1] - 1).to(own.device)
        own = own[torch.arange(len(own), device=own.device)[:, None, None], before]
        return F.smooth_l1_loss(hidden.float(), own, reduction="none").mean(-1)

    def _hidden(self, rows: Tensor, texts: Sequence[Text], anchors: Tensor) -> Tensor:
        """[S, A, B - 1, d] bf16: final hidden states of the drafts of the blocks at `anchors`."""
        config = self._config
        tokens = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
        for row, text, places in zip(tokens, texts, anchors, strict=True):
            row[:, 0] = torch.tensor(text.tokens)[places]
        embedded = self._shared.embeddings[tokens.to(self._device)]
        features = rows[..., : config.tapped_size]
        with torch.autocast(self._device.partition(":")[0], torch.bfloat16):
            hidden: Tensor = self.network(features, embedded, anchors.to(self._device))
        return hidden[:, :, 1:].bfloat16()

    def _rows(self, texts: Sequence[Text]) -> Tensor:
        """Features of texts, [S, L, width], padded at their ends."""
        longest = max(len(text.tokens) for text in texts)
        rows = torch.zeros(len(texts), longest, self._features.width)
        for row, text in zip(rows, texts, strict=True):
            found = torch.from_numpy(self._features.of(text.place).astype(np.float32))
            row[: len(found)] = found
        return rows.to(self._device)

    def _spread(self) -> Tensor:
        """[taps * d]: the standard deviation of what the drafter sees, in some of the texts.

        The first token of a text is left out: it is what others turn to when they need nothing,
        and hundreds of times as large.
        """
        some = self._learnt[:: -(-len(self._learnt) // _LOOKED_AT)]
        rows = np.concatenate([self._features.of(text.place)[1:] for text in some])
        seen = torch.from_numpy(rows[:, : self._config.tapped_size].astype(np.float32))
        return seen.std(0).clamp(min=1e-6)

    def _batches(self) -> Iterator[list[Text]]:
        """Texts of about one length together; the same order however often a run is stopped."""
        size = self._schedule.texts
        per_epoch = max(len(self._learnt) // size, 1)
        while True:
            epoch = self.step // per_epoch
            rng = np.random.default_rng((self._schedule.seed, 7, epoch))
            noise = rng.uniform(0.8, 1.25, len(self._learnt))
            lengths = [len(text.tokens) for text in self._learnt]
            order = np.argsort(np.array(lengths) * noise)[: per_epoch * size]
            for number in rng.permutation(per_epoch)[self.step % per_epoch :]:
                yield [self._learnt[i] for i in order[number * size : (number + 1) * size]]

    def _rate(self) -> float:
        """A rise, then half a cosine down to a tenth."""
        schedule = self._schedule
        rise = max(schedule.warmup * schedule.steps, 1)
        if self.step < rise:
            return schedule.rate * (self.step + 1) / rise
        done = (self.step - rise) / max(schedule.steps - rise, 1)
        return schedule.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def _note(self, loss: float, tau: float) -> None:
        """Keep the state, and a point of the curve."""
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

    def _about_run(self) -> dict[str, Any]:
        """What makes a run this one; how long it is to be may change."""
        schedule = asdict(self._schedule)
        del schedule["steps"], schedule["evaluate_every"]
        drafted = self._shared.drafted.tolist()
        texts = [(text.first, *text.tokens) for text in self._learnt]
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


_LOOKED_AT = 40
"""Held-out answers that tau is measured on."""

_BLOCKS_AT_ONCE = 128

_AWAY = 10.0
"""What the distance of hidden states weighs; about half the loss."""


def _places(text: Text, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Where blocks begin: places of the answer, each once where there are enough."""
    room = len(text.tokens) - 1 - text.first
    return text.first + rng.choice(room, count, replace=room < count)


def most_frequent(answers: Sequence[Answer], count: int) -> list[int]:
    """The `count` tokens that answers use most, ascending."""
    tokens = np.concatenate([answer.answer for answer in answers])
    counts = np.bincount(tokens)
    order = np.argsort(-counts, kind="stable")[:count]
    return sorted(order[counts[order] > 0].tolist())


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1)
