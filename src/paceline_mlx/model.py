"""A model loaded by mlx-lm, and its forward passes: tokens in, lazy arrays out.

Depends on neither blocks nor sampling nor sequences. Model classes, caches and quantized layers are
mlx-lm's own.
"""

import copy
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from paceline.errors import InvalidRequest, ModelError
from paceline_mlx.caches import is_recurrent, leaves, make_caches
from paceline_mlx.hooks import Array, tap
from paceline_mlx.rollback import Recorder
from paceline_mlx.states import States
from paceline_mlx.thresholds import FEW_ROWS, capacity
from paceline_mlx.together import Together

_PADDING = 0

_MAX_REASON_LENGTH = 300

Tokens = Sequence[int] | Array


class LazyOutputs(NamedTuple):
    logits: Array
    """[T, vocab], in the model's precision."""
    taps: dict[int, Array]
    """Tapped layer -> [T, d]."""


class LoadedModel:
    def __init__(self, module: Any, taps: Sequence[int] = ()) -> None:
        """Wrap one of mlx-lm's models, and install hooks on some of its modules.

        Every forward pass returns the hidden states after the layers `taps`, from 0.

        Raises:
            ModelError: one of its caches cannot be rolled back.
            InvalidRequest: a tapped layer does not exist.
        """
        self.module = module
        """mlx-lm's model, for drafters that share parts of it."""
        caches = make_caches(module)
        missing = [layer for layer in taps if not 0 <= layer < len(module.layers)]
        if missing:
            raise InvalidRequest(
                f"cannot tap layers {', '.join(map(str, missing))}: the model has layers 0 to "
                f"{len(module.layers) - 1}"
            )
        recurrent = any(is_recurrent(cache) for cache in leaves(caches))
        # The recorder's hooks go between the two others: it records one sequence's share of
        # projected rows, and a mixer's call for one sequence.
        self._together = Together(module, caches)
        self._recorder = Recorder(module) if recurrent else None
        self._together.hook_mixers()
        self.mixers = self._together.mixers
        """Modules that read other rows; if empty, `call_together` does not work."""
        self._tapped: dict[int, Array] = {}  # of the last forward pass, [1, T, d]
        for layer in taps:
            tap(module.layers[layer], self._tapped, layer)
        self.few_shapes = _keys_are_padded() and not recurrent
        """True if passes use only `FEW_ROWS` and `CAPACITIES`: the device plans every new shape."""

    def empty(self) -> States:
        return States(partial(make_caches, self.module), self._recorder)

    def call(
        self, states: States, tokens: Tokens, *, min_rows: int = 1, drafted: bool = False
    ) -> LazyOutputs:
        """Run T tokens after the context in `states`, and append them to it.

        Fewer than `min_rows` are padded. If `drafted`, padding also enters the caches: rows may be
        rejected, so rollback to any of them must be cheap.
        """
        end = states.held + len(tokens)
        if self.few_shapes:
            min_rows = next((rows for rows in FEW_ROWS if rows >= len(tokens)), min_rows)
        rows = _padded(tokens, min_rows)
        with states.call(len(rows), drafted=drafted) as caches:
            logits = self.module(rows[None], cache=caches)[0]
        if not drafted:
            states.roll_back(end)
        outputs = _outputs(logits, self._tapped, slice(0, len(tokens)))
        self._tapped.clear()
        return outputs

    def call_together(
        self, parts: Sequence[tuple[States, Tokens]], *, min_rows: int = 1
    ) -> list[LazyOutputs]:
        """Run tokens of several sequences in one forward pass; see `together.py`.

        `parts` has each sequence's caches and tokens, as for `call` with `drafted`.
        """
        if len(parts) == 1:
            return [self.call(*parts[0], min_rows=min_rows, drafted=True)]
        rows = [_padded(tokens, min_rows) for _, tokens in parts]
        counts = [len(padded) for padded in rows]
        with ExitStack() as stack:
            caches = [
                stack.enter_context(states.call(count, drafted=True))
                for (states, _), count in zip(parts, counts, strict=True)
            ]
            layers = stack.enter_context(self._together.calling(caches, counts))
            logits = self.module(mx.concatenate(rows)[None], cache=layers)[0]
        starts = [sum(counts[:number]) for number in range(len(counts))]
        outputs = [
            _outputs(logits, self._tapped, slice(start, start + len(tokens)))
            for start, (_, tokens) in zip(starts, parts, strict=True)
        ]
        self._tapped.clear()
        return outputs

    @property
    def layers(self) -> int:
        return len(self.module.layers)

    def embed(self, tokens: Array) -> Array:
        return self._embedding(tokens)

    def head(self, hidden: Array) -> Array:
        """Compute logits [..., vocab] of hidden states [..., d] after the final norm."""
        return _linear(self._head)(hidden)

    def head_of(self, tokens: Array) -> Callable[[Array], Array]:
        """Return a head for these tokens [n] only, with logits [..., n].

        It has copies of their rows, quantized like the head.
        """
        rows = copy.copy(self._head)
        for name in ("weight", "scales", "biases", "bias"):
            if name in rows:
                rows[name] = rows[name][tokens]
        return _linear(rows)

    @cached_property
    def _embedding(self) -> Any:
        kinds = (nn.Embedding, nn.QuantizedEmbedding)
        return next(module for module in self.module.modules() if isinstance(module, kinds))

    @cached_property
    def _head(self) -> Any:
        named = self.module.named_modules()
        heads = [module for name, module in named if name.split(".")[-1] == "lm_head"]
        return heads[0] if heads else self._embedding


def _padded(tokens: Tokens, min_rows: int) -> Array:
    """Return token ids [T], padded to at least `min_rows`."""
    missing = max(min_rows - len(tokens), 0)
    return mx.pad(mx.array(tokens), (0, missing), constant_values=_PADDING)


def _outputs(logits: Array, tapped: dict[int, Array], rows: slice) -> LazyOutputs:
    return LazyOutputs(logits[rows], {layer: states[0, rows] for layer, states in tapped.items()})


def _linear(head: Any) -> Callable[[Array], Array]:
    called: Callable[[Array], Array] = getattr(head, "as_linear", head)
    return called


def plans_shapes() -> bool:
    """Return True if the device plans attention for every new shape, as cuDNN does."""
    return bool(mx.cuda.is_available()) and mx.default_device() == mx.gpu


def _keys_are_padded() -> bool:
    """Return whether the device plans shapes; if so, patch MLX to pad all keys to `capacity`."""
    original = mx.fast.scaled_dot_product_attention
    if not plans_shapes() or hasattr(original, "pads_keys"):
        return plans_shapes()

    def padded(q: Array, k: Array, v: Array, *, mask: Any = None, **options: Any) -> Array:
        rows, keys = q.shape[2], k.shape[2]
        if rows > 1:  # a single row uses a kernel without plans
            free = capacity(keys) - keys
            if not isinstance(mask, mx.array):
                first = keys if mask is None else keys - rows  # the first row's last visible key
                mask = mx.arange(keys) <= mx.arange(first, first + rows)[:, None]
            hidden = False if mask.dtype == mx.bool_ else mx.finfo(mask.dtype).min
            sides = [(0, 0)] * (mask.ndim - 1)
            mask = mx.pad(mask, [*sides, (0, free)], constant_values=hidden)
            k, v = (mx.pad(array, [(0, 0), (0, 0), (0, free), (0, 0)]) for array in (k, v))
        return original(q, k, v, mask=mask, **options)

    padded.pads_keys = True  # type: ignore[attr-defined]
    mx.fast.scaled_dot_product_attention = padded
    return True


def load(folder: Path) -> Any:
    """Load the checkpoint in `folder` with mlx-lm.

    Raises:
        ModelError: mlx-lm does not support the model, or cannot read it.
    """
    from mlx_lm.utils import load_config, load_model

    # As in mlx-lm's server: the system keeps the weights in memory between requests.
    wired = mx.device_info().get("max_recommended_working_set_size")
    if wired is not None:
        mx.set_wired_limit(wired)
    try:
        return load_model(folder, model_config=_rope_settings(load_config(folder)))[0]
    except Exception as error:  # of any type: model code fails on an incomplete config
        raise ModelError(f"{folder} cannot be loaded by mlx-lm: {one_line(error)}") from error


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers 5's `rope_parameters` under transformers 4's names.

    Most models of mlx-lm 0.32 read only those, and would compute rotations with a default theta.
    """
    inner, by_layer = config.get("text_config"), config.get("rope_parameters")
    if isinstance(inner, dict):
        return {"text_config": inner | _rope_settings(inner)}
    if not isinstance(by_layer, dict):
        return {}
    rope, sliding = by_layer.get("full_attention") or by_layer, by_layer.get("sliding_attention")
    settings = {
        "rope_theta": rope.get("rope_theta"),
        "rope_local_base_freq": sliding and sliding.get("rope_theta"),
        "partial_rotary_factor": by_layer.get("partial_rotary_factor"),
    }
    if rope.get("rope_type") not in (None, "default"):
        settings["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    return {name: value for name, value in settings.items() if value and config.get(name) is None}


def one_line(error: BaseException) -> str:
    """Return an MLX or mlx-lm error's message, shortened: it may list all tensors."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        reason = f"missing key {reason}"
    return textwrap.shorten(reason, _MAX_REASON_LENGTH, placeholder=" ...")
