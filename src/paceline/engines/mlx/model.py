"""A model as mlx-lm loads it, and its calls: tokens in, lazy arrays out.

Knows mlx-lm's loader and nothing of blocks, sampling or sequences. Nothing of a model is written
here a second time: its classes, its caches and its quantized layers are mlx-lm's own.
"""

import copy
import importlib.util
import platform
import textwrap
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from paceline.engines.mlx.caches import is_recurrent, leaves, make_caches
from paceline.engines.mlx.hooks import Array, Taps
from paceline.engines.mlx.rollback import Recorder
from paceline.engines.mlx.states import States
from paceline.errors import InvalidRequest, MissingExtra, ModelError

_PADDING = 0
"""Token of a row that nobody reads: any will do."""

_LONGEST_REASON = 300
"""Characters of an error that are passed on."""


Tokens = Sequence[int] | Array


class Called(NamedTuple):
    """What a call will have brought, once it is evaluated."""

    logits: Array
    """[T, vocab], in the model's own precision."""
    taps: dict[int, Array]
    """[T, d] for each layer that is tapped."""


class LoadedModel:
    """A model in memory."""

    def __init__(self, module: Any, taps: Sequence[int] = ()) -> None:
        """Take over a model of mlx-lm, and hear some of its modules from now on.

        Args:
            module: the model, as `load` returns it.
            taps: layers whose hidden states every call returns, by their numbers from 0.

        Raises:
            ModelError: it holds what cannot be taken back to an earlier position.
            InvalidRequest: a layer is to be tapped that there is not.
        """
        self.module = module
        """mlx-lm's own, for those who share parts of it."""
        caches = make_caches(module)
        missing = [tap for tap in taps if not 0 <= tap < len(module.layers)]
        if missing:
            raise InvalidRequest(
                f"the model has layers 0 to {len(module.layers) - 1}, so "
                f"{', '.join(map(str, missing))} cannot be tapped"
            )
        recurrent = any(is_recurrent(cache) for cache in leaves(caches))
        self._recorder = Recorder(module) if recurrent else None
        self._taps = Taps(module.layers, taps)

    def empty(self) -> States:
        """The states of a new sequence."""
        return States(partial(make_caches, self.module), self._recorder)

    def call(
        self, states: States, tokens: Tokens, *, least: int = 1, drafted: bool = False
    ) -> Called:
        """Run tokens behind what `states` hold.

        Args:
            states: what is held of the sequence; they will hold the tokens too.
            tokens: T token ids, or an array of them.
            least: rows the call has at least. Those that fill it up are held, too.
            drafted: whether the rows may fall, so that it must be cheap to go back among them.
        """
        import mlx.core as mx

        count = len(tokens)
        rows = mx.pad(mx.array(tokens), (0, max(least - count, 0)), constant_values=_PADDING)
        with states.call(len(rows), drafted=drafted) as caches:
            logits = self.module(rows[None], cache=caches)[0]
        return Called(logits[:count], {tap: hs[:count] for tap, hs in self._taps.take().items()})

    @property
    def layers(self) -> int:
        """How many it has."""
        return len(self.module.layers)

    def embed(self, tokens: Array) -> Array:
        """The model's embeddings, [..., d], of token ids [...]."""
        return self._embedding(tokens)

    def head(self, hidden: Array) -> Array:
        """Logits [..., vocab] of hidden states [..., d] that went through the last norm."""
        return _linear(self._head)(hidden)

    def head_of(self, tokens: Array) -> Callable[[Array], Array]:
        """The head for these tokens [n] alone: its logits are [..., n].

        It has its own copy of their rows, quantized as the head is.
        """
        rows = copy.copy(self._head)
        for name in ("weight", "scales", "biases", "bias"):
            if name in rows:
                rows[name] = rows[name][tokens]
        return _linear(rows)

    @cached_property
    def _embedding(self) -> Any:
        from mlx import nn

        kinds = (nn.Embedding, nn.QuantizedEmbedding)
        return next(each for each in self.module.modules() if isinstance(each, kinds))

    @cached_property
    def _head(self) -> Any:
        """A module: the embedding itself where there is no other."""
        named = self.module.named_modules()
        own = [module for name, module in named if name.split(".")[-1] == "lm_head"]
        return own[0] if own else self._embedding


def _linear(head: Any) -> Callable[[Array], Array]:
    called: Callable[[Array], Array] = getattr(head, "as_linear", head)
    return called


def device() -> str:
    """What MLX computes on, in words."""
    import mlx.core as mx

    return f"{mx.default_device()} {mx.device_info().get('device_name', platform.machine())}"


def require_mlx_lm() -> None:
    """Say so before anything is fetched if mlx-lm is not there.

    Raises:
        MissingExtra: it is not installed.
    """
    if importlib.util.find_spec("mlx_lm") is None:
        raise MissingExtra(
            "the engine mlx needs mlx-lm; install it with `pip install 'paceline[mlx]'`"
        )


def load(folder: Path) -> Any:
    """The checkpoint in `folder`, loaded by mlx-lm.

    Raises:
        MissingExtra: mlx-lm is not installed.
        ModelError: mlx-lm does not know the model, or cannot read it.
    """
    require_mlx_lm()
    import mlx.core as mx
    from mlx_lm.utils import load_model

    # As mlx-lm's own server does: the system leaves the weights in memory between requests.
    most = mx.device_info().get("max_recommended_working_set_size")
    if most is not None:
        mx.set_wired_limit(most)
    try:
        return load_model(folder)[0]
    except Exception as error:  # of any kind: what a config lacks shows in the model's own code
        raise ModelError(f"{folder} cannot be loaded by mlx-lm: {in_a_line(error)}") from error


def in_a_line(error: BaseException) -> str:
    """What MLX or mlx-lm says is wrong, which may be a list of all tensors."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        reason = f"there is no {reason}"
    return textwrap.shorten(reason, _LONGEST_REASON, placeholder=" ...")
