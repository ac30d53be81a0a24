"""The head that is trained: one decoder layer that continues the model's last hidden state.

It is EAGLE-3's form (arXiv 2503.01840) whose only tap is the state after the final norm, with a
vocabulary of its own. Row l of an answer has the state after token l and the embedding of token
l + 1, and predicts token l + 2; from its own output it goes on to l + 3 and so forth.

Its rows are those of answers alone, without the prompt: where drafts are made, a prompt has logits
only after its last token, and in training rows of the prompt made no difference (README.md).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from decode import Sizes
from torch import Tensor, nn

from paceline.drafters.mtp import HeadConfig
from paceline_lab.train.layers import RMSNorm, Rope, initialise
from paceline_lab.train.mtp_network import Layer

COMMON, RANK = 6144, 64
"""Tokens whose embeddings have all d values, and values of the embeddings of the others."""


class Vocabulary(nn.Module):
    """Embeddings in two levels, for input and output alike.

    A matrix of all 49,152 tokens would be most of the head's bytes, and reading it most of a
    draft's time. 6,144 of them are 86 % of the tokens of answers; without the others one draft in
    seven could not be right. They get 64 values each, and both levels are under a quarter of it:

        common   [c, d]        embedding = row              logit = row . state
        rest     [v - c, r]    embedding = into row         logit = row . (outof state)
    """

    def __init__(self, target: Tensor, order: Tensor, common: int, rank: int) -> None:
        """Begin with the target's own output matrix [vocab, d]; `order`: tokens, common first."""
        super().__init__()
        self.order: Tensor
        self.rows: Tensor
        self.register_buffer("order", order)
        self.register_buffer("rows", order.argsort(), persistent=False)
        ordered = target[order].float()
        rest = ordered[common:]
        # The r directions of rows that leave out the least of them.
        basis = torch.linalg.eigh(rest.T @ rest).eigenvectors[:, -rank:]  # [d, r]
        self.common = nn.Parameter(ordered[:common].clone())
        self.rest = nn.Parameter(rest @ basis)
        self.into = nn.Parameter(basis.clone())
        self.outof = nn.Parameter(basis.T.clone())

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [...] -> embeddings [..., d]."""
        rows, count = self.rows[tokens], len(self.common)
        common = self.common[rows.clamp(max=count - 1)]
        rest = F.linear(self.rest[(rows - count).clamp(min=0)], self.into)
        return torch.where((rows < count)[..., None], common, rest.to(common.dtype))

    def logits(self, states: Tensor) -> Tensor:
        """[n, d] -> [n, vocab], in the order of `order`."""
        rest = F.linear(F.linear(states, self.outof), self.rest)
        return torch.cat([F.linear(states, self.common), rest], dim=-1)


class Head(nn.Module):
    """The network; its names are those of the head's file (`paceline.drafters.mtp.logits_head`)."""

    def __init__(self, config: HeadConfig, words: Vocabulary, std: Tensor) -> None:
        """`std` [d] is the standard deviation of the states, by which they are divided."""
        super().__init__()
        d = config.hidden_size
        self.config = config
        self.std: Tensor
        self.register_buffer("std", std)
        self.fc = nn.Linear(d, d, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(d, config.rms_norm_eps)
        initialise(self)
        # At first the stream is the state itself: logits begin as those after the last token.
        self.fc.weight.data = 0.5 * self.fc.weight.data + torch.diag(std.cpu())
        self.words = words

    def forward(self, states: Tensor, tokens: Tensor, predicts: Tensor, steps: int) -> list[Tensor]:
        """Logits of draft steps 1 to `steps`, given the true tokens before each.

        Args:
            states: [answers, rows, d], after tokens 0, 1 and so on.
            tokens: [answers, rows + steps], tokens 1, 2 and so on.
            predicts: [answers, rows] bool, of rows whose logits are wanted.
            steps: tokens that a row drafts.

        Returns:
            Per step [predicting rows, vocab].
        """
        attention = _Attention(self.midlayer, self.config, states.shape[1], states.device)
        stream = self.fc(states / self.std)
        embedded = self.words.embed(tokens)
        step_logits = []
        for step in range(steps):
            joined = self.midlayer.joined(embedded[:, step : step + states.shape[1]], stream)
            stream = stream + attention(joined, step)
            stream = stream + self.midlayer.mlp(self.midlayer.post_attention_layernorm(stream))
            step_logits.append(self.words.logits(self.norm(stream[predicts])))
        return step_logits


class _Past(NamedTuple):
    """Keys and values, [answers, heads, rows, values of a head]."""

    keys: Tensor
    values: Tensor


class _Attention:
    """Attention of all draft steps at once.

    When row l drafts its third token, the target has computed states up to l, and the head has
    rows of its own for what it drafted since. So row l of step 2 attends to rows 0 to l of step 0
    (whose states are true), and to row l of steps 1 and 2 (its own chain), but to no other chain:

        step 0   x x x .        step 1   . . x .        step 2   . . x .        (row 2 of four)
    """

    def __init__(self, layer: Layer, config: HeadConfig, rows: int, device: torch.device) -> None:
        self._weights, self._config = layer.self_attn, config
        self._positions = torch.arange(rows, device=device)
        self._is_later = torch.ones(rows, rows, dtype=torch.bool, device=device).triu(1)
        self._true: _Past | None = None
        self._chain: list[_Past] = []

    def __call__(self, joined: Tensor, step: int) -> Tensor:
        """Input [answers, rows, 2 d] -> what is added to the stream, [answers, rows, d]."""
        weights, config = self._weights, self._config
        rope = Rope(self._positions + step, config.head_dim, config.rope_theta)
        shares = config.num_attention_heads // config.num_key_value_heads

        def split(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

        queries = rope.rotate(split(weights.q_proj(joined))) * config.head_dim**-0.5
        keys = rope.rotate(split(weights.k_proj(joined))).repeat_interleave(shares, dim=1)
        past = _Past(keys, split(weights.v_proj(joined)).repeat_interleave(shares, dim=1))
        if self._true is None:
            self._true = past
        else:
            self._chain.append(past)
        true = self._true
        scores = [(queries @ true.keys.mT).masked_fill(self._is_later, -torch.inf)]
        scores += [(queries * own.keys).sum(-1, keepdim=True) for own in self._chain]
        shares_of = torch.cat(scores, dim=-1).softmax(-1).to(past.values.dtype)
        rows = len(self._positions)
        mixed = shares_of[..., :rows] @ true.values
        for number, own in enumerate(self._chain, start=rows):
            mixed = mixed + shares_of[..., number, None] * own.values
        out: Tensor = weights.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


def new_head(sizes: Sizes, target: Tensor, order: Tensor, std: Tensor) -> Head:
    """A head for a model of these sizes, before training.

    Args:
        sizes: of the model; the head's layer has the same.
        target: [vocab, d], the model's output matrix.
        order: [vocab] int64, tokens, the most frequent first.
        std: [d], of the model's states.
    """
    config = HeadConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head,
        rotary_dims=sizes.head,
        vocab_size=sizes.vocab,
        rms_norm_eps=1e-5,
        rope_theta=sizes.rope_base,
        taps=(),
    )
    common, rank = min(COMMON, sizes.vocab // 2), min(RANK, sizes.width // 2)
    words = Vocabulary(target, order, common, rank)
    head: Head = Head(config, words, std).to(target.device)
    return head
