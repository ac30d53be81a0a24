"""Heads that read logits, made of heads in EAGLE-3's form."""

from pathlib import Path

import numpy as np

from paceline.drafters.mtp import HeadConfig
from paceline_lab.train.logits import LogitsReader, two_levels
from paceline_lab.train.logits_head_checkpoint import save_logits_head
from support.mtp import HeadForm, Weights, random_weights

DRAFTED = [token for token in range(320) if token % 9]
LOGITS_HEAD = HeadForm(heads=4, kv_heads=4, drafted=DRAFTED, taps=(1,))
"""Its only tap is the target's last layer, after the final norm."""


def write_logits_head(
    folder: Path,
    embeddings: np.ndarray,
    head: np.ndarray,
    weights: Weights | None = None,
    form: HeadForm = LOGITS_HEAD,
) -> None:
    """Write a head for a target with these matrices [vocab, d]; without `weights`, random ones."""
    assert form.drafted is not None
    config = HeadConfig(
        hidden_size=form.d,
        intermediate_size=form.ff,
        num_attention_heads=form.heads,
        num_key_value_heads=form.kv_heads,
        head_dim=form.head_dim,
        rotary_dims=form.head_dim,
        vocab_size=form.vocab,
        rms_norm_eps=form.epsilon,
        rope_theta=form.theta,
        taps=tuple(form.taps),
    )
    drafted = list(form.drafted)
    reader = LogitsReader(head[drafted].astype(np.float32), drafted)
    levels = two_levels(embeddings.astype(np.float32), drafted)
    chosen = random_weights(form) if weights is None else weights
    save_logits_head(chosen, config, levels, reader, folder)
