"""Which published head a folder has, and which targets it fits, from `config.json` alone."""

from pathlib import Path
from typing import NamedTuple

from paceline.drafters.dflash import read_config
from paceline.drafters.mtp import eagle3
from paceline.drafters.networks.target import TargetShape, check_pair
from paceline.errors import ModelError
from paceline.storage.files import read_json

_FORMS = {
    "DFlashDraftModel": "DFlash",
    "DFlash2DraftModel": "DFlash 2",
    "Qwen3DSparkModel": "DSpark",
    **dict.fromkeys(eagle3.ARCHITECTURES, "EAGLE-3"),
}
"""Architecture -> name of the form."""

_USUAL_LAYERS = 32
"""Layers of a target for which an EAGLE-3 head without layer ids is read: only its taps differ."""


class HeadFacts(NamedTuple):
    """A head's form, and the sizes of its target; a `DrafterShape`."""

    form: str
    drafter: str
    """The drafter that runs it: `dflash` or `mtp`."""
    hidden_size: int
    vocab_size: int
    num_target_layers: int | None
    """None: its config has none."""


def architecture(folder: Path) -> str | None:
    """The architecture in a folder's `config.json`; None: there is none."""
    if not (folder / "config.json").is_file():
        return None
    raw = read_json(folder / "config.json")
    names = raw.get("architectures") if isinstance(raw, dict) else None
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def is_head(folder: Path) -> bool:
    """Whether a folder's config names a known form of heads; the head may be faulty."""
    try:
        return architecture(folder) in _FORMS
    except ModelError:
        return False


def read_facts(folder: Path) -> HeadFacts:
    """Read `config.json`.

    Raises ModelError: it is no head, of a form that is not known, or faulty.
    """
    name = architecture(folder)
    if name not in _FORMS:
        raise ModelError(
            f"{folder}: its architecture is {name}; expected a head in the form of "
            f"{', '.join(_FORMS)}"
        )
    if name in eagle3.ARCHITECTURES:
        head = eagle3.read_config(folder, lambda: _USUAL_LAYERS)
        sizes = head.hidden_size, head.vocab_size, head.num_target_layers
        return HeadFacts(_FORMS[name], "mtp", *sizes)
    config = read_config(folder)
    sizes = config.hidden_size, config.vocab_size, config.num_target_layers
    return HeadFacts(_FORMS[name], "dflash", *sizes)


def misfit(folder: Path, facts: HeadFacts, target: TargetShape) -> str | None:
    """Why a head is not for a target, in a line; None: its sizes fit."""
    try:
        check_pair(folder, facts, target)
    except ModelError as error:
        return str(error)
    return None
