"""Exports a Hugging Face checkpoint to OpenVINO with optimum-intel, in a child process.

optimum-intel comes with the extra `convert`.
"""

import importlib.util
from pathlib import Path

from paceline.errors import InvalidRequest, MissingExtra, ModelError
from paceline.models.cache import disk_full
from paceline.models.hf_config import read_facts
from paceline.models.manifest import GRAPH, TOKENIZER, Facts
from paceline.models.processes import Finished, python, run_child
from paceline.models.progress import Progress

WEIGHTS = {"int8": "int8", "int4": "int4", "f16": "fp16"}
"""Name of a weight format here -> in optimum."""

OPTIMUM = "import paceline; from optimum.commands.optimum_cli import main; main()"
"""optimum's command line, after what importing paceline switches off."""

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_NO_NETWORK = ("cannot find the requested files", "ConnectionError", "ConnectError", "Max retries")


def convert_checkpoint(source: str, work: Path, weights: str, progress: Progress) -> Facts:
    """Export the checkpoint `source` (a folder, or a hub name) into the folder `work`.

    Raises:
        MissingExtra: optimum-intel is not installed.
        InvalidRequest: the weight format is unknown.
        ModelError: the export failed, with the exporter's reason.
        OSError: the files cannot be written.
    """
    if weights not in WEIGHTS:
        raise InvalidRequest(f"weights is {weights!r}; expected one of {', '.join(WEIGHTS)}")
    if importlib.util.find_spec("optimum") is None:
        raise MissingExtra(
            "converting needs optimum-intel and torch: install them with "
            "`pip install 'paceline[convert]'`"
        )
    command = python(
        *("-c", OPTIMUM, "export", "openvino", "--model", source),
        *("--task", "text-generation-with-past", "--weight-format", WEIGHTS[weights], str(work)),
    )
    with progress.task(f"converting {source} to OpenVINO, {weights} weights"):
        finished = run_child(command)
    if finished.code != 0 or not (work / GRAPH).is_file():
        raise _failure(source, finished)
    if not (work / TOKENIZER).is_file():
        raise ModelError(
            f"{source} has no fast tokenizer ({TOKENIZER}); add one to the checkpoint with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    return read_facts(work)


def checkpoint_bytes(folder: Path) -> int:
    """Bytes of the weights in `folder`. Raises ModelError for a folder without a checkpoint."""
    weights = [path for pattern in _WEIGHT_FILES for path in folder.glob(pattern)]
    if not weights or not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} is not a Hugging Face checkpoint: expected config.json and "
            f"{' or '.join(_WEIGHT_FILES)}"
        )
    return sum(path.stat().st_size for path in weights)


def _failure(source: str, finished: Finished) -> Exception:
    if finished.disk_full:
        return disk_full()
    if any(sign in finished.text for sign in _NO_NETWORK):
        return ModelError(
            f"cannot fetch {source}: the Hugging Face hub cannot be reached; check the network, or "
            "give the path of a checkpoint folder"
        )
    return ModelError(f"{source} cannot be converted: {finished.reason}")
