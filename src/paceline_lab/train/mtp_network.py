"""An EAGLE-3 head in torch, for training: several texts and several draft steps in a forward pass.

The architecture is the public one (arXiv 2503.01840; vLLM's `llama_eagle3.py`). Row i of a text
has the target's hidden states after token i and the embedding of token i + 1; it predicts token
i + 2. In later steps a row has its own last output in place of the target's hidden states, and
attends to the earlier rows of the text and to its own earlier steps ("training-time test").
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.drafters.mtp import HeadConfig
from paceline_lab.train.layers import FeedForward, RMSNorm, Rope, initialise


class Rows(NamedTuple):
    """A text in a forward pass of n rows, of which the m last but one predict."""

    tapped: Tensor
    """[n, taps * d]: the target's hidden states after tokens 0 to n - 1."""
    embedded: Tensor
    """[n + 1, d]: embeddings of the text's n + 1 tokens."""
    first: int
    """The first row that predicts; the row before the last is the last one."""


class Attention(nn.Module):
    """Llama's attention, with inputs twice as wide: embedding and hidden state."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        d, hd = config.hidden_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * d, self.heads * hd, bias=False)
        self.k_proj = nn.Linear(2 * d, self.kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(2 * d, self.kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(self.heads * hd, d, bias=False)

    def keys_and_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[n, 2 d] -> rotated keys and values, both [heads, n, head_dim]."""
        shares = self.heads // self.kv_heads
        k = self.k_proj(x).view(len(x), self.kv_heads, -1).transpose(0, 1)
        v = self.v_proj(x).view(len(x), self.kv_heads, -1).transpose(0, 1)
        return (
            rope.rotate(k).repeat_interleave(shares, dim=0),
            v.repeat_interleave(shares, dim=0),
        )

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """[m, 2 d] -> rotated queries, [heads, m, head_dim]."""
        q = self.q_proj(x).view(len(x), self.heads, -1).transpose(0, 1)
        return rope.rotate(q)


class Layer(nn.Module):
    """The weights of the only layer; `HeadNetwork` has its forward pass."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def joined(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[n, d] and [n, d] -> the attention's input, [n, 2 d]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)


class HeadNetwork(nn.Module):
    """The head's own weights, under the names of public checkpoints."""

    def __init__(
        self, config: HeadConfig, std: Tensor | None = None, *, dropout: float = 0.0
    ) -> None:
        """Initialise with random weights.

        `std` [taps * d] is the standard deviation of the tapped hidden states, by which training
        divides them: late layers are ten times as large as early ones. A checkpoint has it in `fc`.
        """
        super().__init__()
        self.config = config
        self.std: Tensor
        deviation = torch.ones(config.tapped_size) if std is None else std
        self.register_buffer("std", deviation, persistent=False)
        self.midlayer = Layer(config)
        self.fc = nn.Linear(config.tapped_size, config.hidden_size, bias=False)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        drafted = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, drafted, bias=False)
        self._dropout = nn.Dropout(dropout)
        initialise(self)

    def forward(self, texts: Sequence[Rows], steps: int) -> list[Tensor]:
        """Logits of draft steps 1 to `steps`.

        Args:
            texts: the rows of the texts.
            steps: tokens that a row drafts.

        Returns:
            Per step [sum of m, draft_vocab]: row i of a text predicts token i + 1 + step. The
            embedding of a token after the end of the text is that of its last token.
        """
        sizes = [len(text.tapped) for text in texts]
        hidden = self._dropout(self.fc(torch.cat([text.tapped for text in texts]) / self.std))
        embedded = torch.cat([text.embedded[1:] for text in texts])
        x = self.midlayer.joined(embedded, hidden)
        pasts = [_Past(self, part, text) for part, text in zip(x.split(sizes), texts, strict=True)]
        counts = [len(past.rows) for past in pasts]
        starts = accumulate(sizes, initial=0)
        predicting = torch.cat([past.rows + at for past, at in zip(pasts, starts, strict=False)])
        rows, joined = hidden[predicting], x[predicting]
        step_logits = []
        for step in range(steps):
            if step:
                tokens = torch.cat([past.embedded(step) for past in pasts])
                joined = self.midlayer.joined(tokens, rows)
            attended = torch.cat(
                [
                    past.attend(part, step)
                    for past, part in zip(pasts, joined.split(counts), strict=True)
                ]
            )
            rows = rows + self._dropout(self.midlayer.self_attn.o_proj(attended))
            normed = self.midlayer.post_attention_layernorm(rows)
            rows = rows + self._dropout(self.midlayer.mlp(normed))
            step_logits.append(self.lm_head(self.norm(rows)))
        return step_logits

    def weights(self) -> dict[str, Tensor]:
        """Name -> tensor, as in a checkpoint."""
        weights = dict(self.state_dict())
        weights["fc.weight"] = weights["fc.weight"] / self.std
        return weights


class _Past:
    """Keys and values of a text, and of the steps of its rows so far."""

    def __init__(self, head: HeadNetwork, x: Tensor, text: Rows) -> None:
        """`x` [n, 2 d] is the attention's input for all rows."""
        config = head.config
        self._head_dim, self._theta = config.head_dim, config.rope_theta
        self._attention = head.midlayer.self_attn
        self._text = text
        self.rows = torch.arange(text.first, len(x) - 1, device=x.device)
        """[m]: the rows that predict."""
        everything = torch.arange(len(x), device=x.device)
        self._keys, self._values = self._attention.keys_and_values(x, self._rope(everything))
        self._mask = everything[None] > self.rows[:, None]
        self._own: list[tuple[Tensor, Tensor]] = []

    def embedded(self, step: int) -> Tensor:
        """[m, d]: embeddings of the tokens that step `step`, from 0, begins with."""
        last = len(self._text.embedded) - 1
        return self._text.embedded[(self.rows + 1 + step).clamp(max=last)]

    def attend(self, x: Tensor, step: int) -> Tensor:
        """Attention of the rows that predict, [m, 2 d] -> [m, heads * head_dim]."""
        rope = self._rope(self.rows + step)
        q = self._attention.queries(x, rope) * self._head_dim**-0.5
        scores = (q @ self._keys.transpose(1, 2)).masked_fill(self._mask, -torch.inf)
        if step:
            self._own.append(self._attention.keys_and_values(x, rope))
        step_scores = [(q * keys).sum(-1, keepdim=True) for keys, _ in self._own]
        shares = torch.cat([scores, *step_scores], dim=-1).float().softmax(-1).to(q.dtype)
        out = shares[..., : self._keys.shape[1]] @ self._values
        for number, (_, values) in enumerate(self._own):
            at = self._keys.shape[1] + number
            out = out + shares[..., at : at + 1] * values
        return out.transpose(0, 1).reshape(len(x), -1)

    def _rope(self, positions: Tensor) -> Rope:
        return Rope(positions, self._head_dim, self._theta)
