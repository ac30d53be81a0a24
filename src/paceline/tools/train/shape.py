"""How big a drafter is, where the caller does not say."""

from collections.abc import Sequence

from paceline.drafters.dflash import Config
from paceline.drafters.dflash.target_weights import TargetWeights
from paceline.errors import InvalidRequest
from paceline.tools.train.answers import Answer

_HEAD = 64
_ROPE_THETA = 100_000.0


def even_taps(layers: int, count: int) -> tuple[int, ...]:
    """Layers of the target to tap, evenly from the second to the fourth from the end (DFlash).

    Raises:
        InvalidRequest: the target has too few layers for so many taps.
    """
    first, last = min(1, layers - 1), max(layers - 3, layers // 2)
    if count == 1:
        return (layers // 2,)
    taps = {round(first + (last - first) * i / (count - 1)) for i in range(count)}
    if len(taps) < count:
        raise InvalidRequest(f"the target has {layers} layers; {count} of them cannot be tapped")
    return tuple(sorted(taps))


def mask_token(answers: Sequence[Answer], special: Sequence[int], vocab_size: int) -> int:
    """A token that stands in no text: a control token if there is one, else the last that does not.

    Raises:
        InvalidRequest: every token is used.
    """
    used = {token for answer in answers for token in answer.tokens}
    for token in [*reversed(special), *reversed(range(vocab_size))]:
        if token not in used:
            return token
    raise InvalidRequest("every token of the vocabulary stands in the answers; none is left")


def shape(
    target: TargetWeights, *, layers: int, block: int, taps: tuple[int, ...], mask_token_id: int
) -> Config:
    """A drafter as wide as its target, with a feed-forward of 8/3 its width.

    Every head has its own keys and values: in a shallow drafter all that a draft learns of the
    token before it passes through values, and the context is short work for one layer.
    """
    d = target.hidden_size
    head = _HEAD if d % _HEAD == 0 and d > _HEAD else d // 2
    heads = d // head
    return Config(
        hidden_size=d,
        intermediate_size=-(-d * 8 // 3 // 64) * 64,
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
