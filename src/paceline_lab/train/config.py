"""Default shape of an MTP head for a target: taps and sizes."""

from paceline.drafters.mtp import HeadConfig
from paceline.drafters.networks.target import TargetWeights

_HEAD = 64
_ROPE_THETA = 100_000.0


def head_taps(layers: int) -> tuple[int, ...]:
    """Layers of the target that a head in EAGLE-3's form taps, if its checkpoint names none.

    Runtimes give it the inputs of layers 2, L // 2 and L - 3. A target of few layers has fewer.
    """
    last = max(layers - 2, 0)
    return tuple(sorted({min(max(tap, 0), last) for tap in (1, layers // 2 - 1, layers - 4)}))


def default_head_config(target: TargetWeights, *, draft_vocab_size: int) -> HeadConfig:
    """A head with the hidden size d of its target, and a feed-forward of 8/3 d."""
    d = target.hidden_size
    head = _HEAD if d % _HEAD == 0 and d > _HEAD else d // 2
    return HeadConfig(
        hidden_size=d,
        intermediate_size=-(-d * 8 // 3 // 64) * 64,
        num_attention_heads=d // head,
        num_key_value_heads=d // head,
        head_dim=head,
        rotary_dims=head,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=_ROPE_THETA,
        taps=head_taps(target.layers),
        num_target_layers=target.layers,
        draft_vocab_size=draft_vocab_size,
    )
