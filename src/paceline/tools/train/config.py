"""Default shapes of a DFlash drafter and of an MTP head for a target: taps, mask token, sizes."""

from collections.abc import Sequence

from paceline.drafters.dflash import Config
from paceline.drafters.mtp import HeadConfig
from paceline.drafters.networks.target import TargetWeights
from paceline.errors import InvalidRequest
from paceline.tools.train.answers import Answer

_HEAD = 64
_ROPE_THETA = 100_000.0


def even_taps(layers: int, count: int) -> tuple[int, ...]:
    """Layers of the target to tap, evenly from the second to the fourth from the end (DFlash).

    Raises InvalidRequest if the target has fewer layers than `count`.
    """
    first, last = min(1, layers - 1), max(layers - 3, layers // 2)
    if count == 1:
        return (layers // 2,)
    taps = {round(first + (last - first) * i / (count - 1)) for i in range(count)}
    if len(taps) < count:
        raise InvalidRequest(f"the target has {layers} layers; {count} of them cannot be tapped")
    return tuple(sorted(taps))


def head_taps(layers: int) -> tuple[int, ...]:
    """Layers of the target that a head in EAGLE-3's form taps, if its checkpoint names none.

    Runtimes give it the inputs of layers 2, L // 2 and L - 3. A target of few layers has fewer.
    """
    last = max(layers - 2, 0)
    return tuple(sorted({min(max(tap, 0), last) for tap in (1, layers // 2 - 1, layers - 4)}))


def mask_token(answers: Sequence[Answer], special: Sequence[int], vocab_size: int) -> int:
    """A token that no text has: an unused control token, else the last unused token.

    Raises InvalidRequest if every token is used.
    """
    used = {token for answer in answers for token in answer.tokens}
    for token in [*reversed(special), *reversed(range(vocab_size))]:
        if token not in used:
            return token
    raise InvalidRequest("the answers use every token of the vocabulary; none is left for the mask")


def default_config(
    target: TargetWeights, *, layers: int, block: int, taps: tuple[int, ...], mask_token_id: int
) -> Config:
    """A drafter with the hidden size d of its target, and a feed-forward of 8/3 d.

    Every head has its own keys and values: in a shallow drafter, draft tokens see each other only
    through values, and attention to the context is cheap in one layer.
    """
    d = target.hidden_size
    heads, head = _heads(d)
    return Config(
        hidden_size=d,
        intermediate_size=_feed_forward(d),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=_ROPE_THETA,
        block_size=block,
        num_target_layers=target.layers,
        target_layer_ids=taps,
        mask_token_id=mask_token_id,
        windows=(None,) * layers,
    )


def default_head_config(target: TargetWeights, *, draft_vocab_size: int) -> HeadConfig:
    """A head with the hidden size d of its target, and a feed-forward of 8/3 d."""
    d = target.hidden_size
    heads, head = _heads(d)
    return HeadConfig(
        hidden_size=d,
        intermediate_size=_feed_forward(d),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head,
        rotary_dims=head,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-5,
        rope_theta=_ROPE_THETA,
        taps=head_taps(target.layers),
        num_target_layers=target.layers,
        draft_vocab_size=draft_vocab_size,
    )


def _heads(d: int) -> tuple[int, int]:
    """Attention heads of a hidden size, and the size of one."""
    head = _HEAD if d % _HEAD == 0 and d > _HEAD else d // 2
    return d // head, head


def _feed_forward(d: int) -> int:
    return -(-d * 8 // 3 // 64) * 64
