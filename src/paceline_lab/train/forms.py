"""The two forms of heads in training: what each reads, and how it is written.

Both have EAGLE-3's network. One reads hidden states of three layers; the other the last one, in the
form of logits, and so drafts for engines that return nothing else.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from paceline.drafters.mtp import HeadConfig
from paceline_lab.train.logits import LogitsReader, joined, two_levels
from paceline_lab.train.logits_head_checkpoint import save_logits_head
from paceline_lab.train.mtp_checkpoint import save_head

Array = npt.NDArray[np.float32]


class HeadForm(Protocol):
    """One form, for one target."""

    name: str
    """Tells what is recorded for it from what is for other forms."""
    embeddings: Array
    """[vocab, d]: those that the head sees."""
    reads_prompts: bool
    """Whether the head reads states of a prompt; else of these the last alone."""

    def recorded(self, states: Array) -> Array:
        """Tapped states [n, taps * d] -> what the head reads of them, then the labels' state."""
        ...

    def labels(self, recorded: Array) -> Array:
        """The last d values of what is recorded [n, d] -> logits of the tokens to draft."""
        ...

    def save(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Write the head."""
        ...


class Eagle3Form(HeadForm):
    """Reads states after three layers; `recorded` adds the last layer's."""

    name = ""
    reads_prompts = True

    def __init__(
        self,
        config: HeadConfig,
        drafted: Sequence[int],
        embeddings: Array,
        target_logits: Callable[[Array], Array],
        context_length: int,
    ) -> None:
        """`target_logits` computes logits of the tokens `drafted` from states after all layers."""
        self.embeddings, self._target_logits = embeddings, target_logits
        self._config, self._drafted, self._context_length = config, drafted, context_length

    def recorded(self, states: Array) -> Array:
        """As they are."""
        return states

    def labels(self, recorded: Array) -> Array:
        """Of the state after the last layer."""
        return self._target_logits(recorded)

    def save(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Write the head, for other runtimes as well."""
        config, drafted = self._config, self._drafted
        save_head(weights, config, drafted, folder, context_length=self._context_length)


class LogitsForm(HeadForm):
    """Reads the state that the output matrix is multiplied by, from which labels follow, too."""

    name = ", of logits"
    reads_prompts = False  # engines return logits of a prompt's last token alone

    def __init__(
        self,
        config: HeadConfig,
        drafted: Sequence[int],
        embeddings: Array,
        head: Array,
        target_logits: Callable[[Array], Array],
    ) -> None:
        """See `Eagle3Form`; `head` are the output matrix's rows of the tokens `drafted`.

        Raises InvalidRequest if these are too few.
        """
        self._config, self._target_logits = config, target_logits
        self._reader = LogitsReader(head, drafted)
        self._levels = two_levels(embeddings, drafted)
        self.embeddings = joined(self._levels, drafted)

    def recorded(self, states: Array) -> Array:
        """States after all layers -> those that logits determine.

        Raises InvalidRequest if the target's logits are more than a product with these.
        """
        logits = self._target_logits(states)
        self._reader.check(logits)
        return self._reader.states(logits)

    def labels(self, recorded: Array) -> Array:
        """Of the same state."""
        return self._reader.logits(recorded)

    def save(self, weights: dict[str, Tensor], folder: Path) -> None:
        """Write the head."""
        floats = {name: one.detach().float().cpu().numpy() for name, one in weights.items()}
        save_logits_head(floats, self._config, self._levels, self._reader, folder)
