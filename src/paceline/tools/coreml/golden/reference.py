"""What transformers itself says of a text, in float32: the authority on every architecture.

Knows transformers and a checkpoint's folder. Knows no artifact. The rule: what stands after a layer
is taken from that layer, by a hook. `output_hidden_states` would give something else at the end:
in most models its last entry has gone through the final norm.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import ModelError

Floats = npt.NDArray[np.float32]


class Said(NamedTuple):
    """Of one text of T tokens."""

    streams: Sequence[Floats]
    """[T, hidden_size]: before the first layer, then after each."""
    logits: Floats
    """[T, vocab]"""


class Reference:
    """A checkpoint's causal language model, all of it in memory as float32."""

    def __init__(self, checkpoint: Path) -> None:
        """Load it.

        Raises:
            ModelError: transformers cannot, or it would have to make up a weight.
        """
        from transformers import AutoModelForCausalLM

        with _quiet():
            try:
                self._model, found = AutoModelForCausalLM.from_pretrained(
                    checkpoint,
                    dtype=torch.float32,
                    local_files_only=True,
                    output_loading_info=True,
                )
            except (OSError, ValueError, KeyError, RuntimeError) as error:
                reason = str(error).strip().split("\n")[0]
                raise ModelError(
                    f"{checkpoint} cannot be opened by transformers: {reason}"
                ) from error
        # Weights that a checkpoint lacks are drawn at random, with a warning only.
        missing = sorted(map(str, found["missing_keys"]))
        if missing:
            raise ModelError(
                f"{checkpoint} lacks {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more weights' if len(missing) > 3 else ''}; "
                "expected a whole checkpoint"
            )
        self._model.eval()
        self._layers = self._model.get_decoder().layers

    @property
    def experts(self) -> bool:
        """Whether routers choose between experts."""
        return any(getattr(self._model.config, name, None) for name in _EXPERTS)

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> Said:
        """A whole text in one call, without a cache."""
        streams: list[Floats] = []
        hooks = [self._layers[0].register_forward_pre_hook(_before(streams), with_kwargs=True)]
        hooks += [layer.register_forward_hook(_after(streams)) for layer in self._layers]
        try:
            logits = self._model(torch.tensor([list(tokens)]), use_cache=False).logits
        finally:
            for hook in hooks:
                hook.remove()
        return Said(streams, logits[0].float().numpy())


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""How transformers' configs call their number."""


def _before(streams: list[Floats]) -> Any:
    def hook(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        streams.append(_rows(args[0] if args else kwargs["hidden_states"]))

    return hook


def _after(streams: list[Floats]) -> Any:
    def hook(_layer: Any, _args: Any, out: Any) -> None:
        # Some layers give their router's state beside the hidden states.
        streams.append(_rows(out[0] if isinstance(out, tuple) else out))

    return hook


def _rows(hidden: Any) -> Floats:
    """[1, T, hidden_size] as [T, hidden_size], of its own."""
    found: Floats = hidden[0].float().numpy().copy()
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bars and warnings: ours says what is wrong."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
