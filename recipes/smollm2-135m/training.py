"""Trains a head on answers of a corpus, and measures it.

Labels are soft: the model's own distributions, which its states give for nothing (logits = W h).
It does not know where the answers come from.
"""

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from conversations import Corpus
from head import Head
from selection import Integers, Spans
from torch import Tensor, nn

DEPTH, DISCOUNT = 4, 0.8
"""Draft tokens in a row that are learnt, and the weight of each after the one before."""
MEASURED = 6
"""Draft tokens of a chain when a head is measured."""
NOISE = 0.02
"""Standard deviations that are added to states: drafts go on from states that are not exact."""
ROWS = 12_288
"""Of a training step, with padding. Logits of 49,152 tokens for them take 1.2 GB a draft step."""
RATE, WARMUP, LAST_RATE = 1.5e-3, 100, 0.02
"""The highest learning rate, steps until it is reached, and the share of it at the end."""


class Batch(NamedTuple):
    """Answers, each from the last token of its prompt on, padded with the last one."""

    states: Tensor
    """[answers, rows + DEPTH, d] float16, after each token."""
    tokens: Tensor
    """[answers, rows + 1 + MEASURED] int64"""
    left: Tensor
    """[answers, rows]: tokens of the answer that a row could draft, from 1 on; less: none."""


def batch_of(corpus: Corpus, spans: Spans, numbers: Integers) -> Batch:
    """The answers `numbers` of `spans`."""
    device = corpus.tokens.device
    begins = torch.from_numpy(spans.begins[numbers] - 1).to(device)[:, None]
    ends = torch.from_numpy(spans.ends[numbers]).to(device)[:, None]
    rows = int(spans.lengths[numbers].max()) - 1
    steps = torch.arange(rows + 1 + MEASURED, device=device)
    places = torch.minimum(begins + steps, ends - 1)
    left = ends - begins - 2 - steps[:rows]
    states = corpus.states[places[:, : rows + DEPTH]]
    return Batch(states, corpus.tokens[places].long(), left)


def batches(lengths: Integers, rng: np.random.Generator) -> Iterator[Integers]:
    """Numbers of answers of similar lengths, at most `ROWS` rows with padding, in random order."""
    by_length = np.argsort(lengths * rng.uniform(0.9, 1.1, len(lengths)))
    parts, begin, longest = [], 0, 0
    for at, number in enumerate(by_length):
        longest = max(longest, int(lengths[number]))
        if (at + 1 - begin) * longest > ROWS and at > begin:
            parts.append(by_length[begin:at])
            begin, longest = at, int(lengths[number])
    parts.append(by_length[begin:])
    for part in rng.permutation(len(parts)):
        yield parts[part]


def loss_of(head: Head, batch: Batch, target: Tensor) -> Tensor:
    """Cross entropy with the model's distributions, mean of draft steps by their weights.

    `target` [vocab, d]: the model's output matrix, in the order of the head's vocabulary.
    """
    rows = batch.left.shape[1]
    states = batch.states[:, :rows].float()
    states = states + NOISE * head.std * torch.randn_like(states)
    predicts = batch.left > 0
    answers, places = predicts.nonzero(as_tuple=True)
    left = batch.left[predicts]
    losses = []
    with torch.autocast(states.device.type, torch.bfloat16):
        step_logits = head(states, batch.tokens[:, 1:], predicts, DEPTH)
        for step, logits in enumerate(step_logits):
            with torch.no_grad():
                label = F.linear(batch.states[answers, places + 1 + step].float(), target)
                chances = label.float().softmax(-1).to(logits.dtype)
            expected = torch.einsum("rv,rv->r", chances, logits).float()
            entropy = logits.float().logsumexp(-1) - expected
            has_token = left > step
            losses.append((entropy * has_token).sum() / has_token.sum().clamp(min=1))
    weights = [DISCOUNT**step for step in range(DEPTH)]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    return torch.as_tensor(total / sum(weights))


def train(
    head: Head,
    corpus: Corpus,
    spans: Spans,
    target: Tensor,
    *,
    share_done: Callable[[], float],
    say: Callable[[str], None],
    seed: int = 0,
) -> None:
    """Train until `share_done()` is 1; the learning rate follows it, not the number of steps.

    `target` [vocab, d] is the model's output matrix.
    """
    ordered = target[head.words.order].to(torch.bfloat16)
    optimizer = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    rng = np.random.default_rng(seed)
    step, epoch, shown = 0, 0, time.monotonic()
    while True:
        for numbers in batches(spans.lengths, rng):
            if (share := share_done()) >= 1:
                return
            cosine = 0.5 * (1 + math.cos(math.pi * share))
            rate = RATE * min(1, (step + 1) / WARMUP) * (LAST_RATE + (1 - LAST_RATE) * cosine)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(head, batch_of(corpus, spans, numbers), ordered)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            step += 1
            if time.monotonic() - shown > 20:
                shown = time.monotonic()
                say(f"head: {share:.0%}, step {step}, epoch {epoch + 1}, loss {float(loss):.3f}")
        epoch += 1


class Quality(NamedTuple):
    """How well a head drafts."""

    right: npt.NDArray[np.float64]
    """[MEASURED]: share of tokens that each draft token predicts if those before it are right."""
    tau: float
    """Tokens of a call of the target: those accepted of a chain, and the target's own."""


@torch.no_grad()
def measure(head: Head, corpus: Corpus, spans: Spans) -> Quality:
    """Draft all of the answers greedily."""
    right, count = np.zeros(MEASURED), np.zeros(MEASURED)
    tokens = calls = 0
    for numbers in batches(spans.lengths, np.random.default_rng(0)):
        batch = batch_of(corpus, spans, numbers)
        rows = batch.left.shape[1]
        predicts = batch.left > 0
        answers, places = predicts.nonzero(as_tuple=True)
        with torch.autocast(predicts.device.type, torch.bfloat16):
            step_logits = head(
                batch.states[:, :rows].float(), batch.tokens[:, 1:], predicts, MEASURED
            )
        drafts = torch.stack([head.words.order[row.argmax(-1)] for row in step_logits], dim=1)
        steps = torch.arange(MEASURED, device=drafts.device)
        truth = batch.tokens[answers[:, None], places[:, None] + 2 + steps]
        has_token = batch.left[predicts][:, None] > steps
        is_right = (drafts == truth) & has_token
        right += is_right.sum(0).cpu().numpy()
        count += has_token.sum(0).cpu().numpy()
        accepted = is_right.int().cumprod(1).sum(1)
        for number in range(len(numbers)):
            # The next call is after the accepted tokens and the target's own.
            lengths = (accepted[answers == number] + 1).tolist()
            row = 0
            while row < len(lengths):
                tokens, calls, row = tokens + lengths[row], calls + 1, row + lengths[row]
    return Quality(right / count.clip(min=1), tokens / max(calls, 1))
