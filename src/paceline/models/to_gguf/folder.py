"""Makes a model folder of a checkpoint: its GGUF file, and the files about text beside it."""

import shutil
from pathlib import Path

from paceline.models.hf_config import read_facts
from paceline.models.manifest import GENERATION, GGUF_WEIGHTS, TEMPLATE, TOKENIZER, Facts
from paceline.models.progress import Progress
from paceline.models.to_gguf.writer import Plan, write

_KEPT = (
    *("config.json", GENERATION, TOKENIZER, "tokenizer_config.json"),
    *(TEMPLATE, "chat_template.json"),
)


def write_folder(plan: Plan, work: Path, progress: Progress) -> Facts:
    """Write the GGUF file into `work`, and copy what is read of a model beside its weights.

    Raises ModelError for an unreadable tokenizer or configuration, before anything is written, and
    OSError.
    """
    folder = plan.shards.folder
    facts = read_facts(folder)
    with progress.task(f"converting {folder.name} to GGUF", plan.size) as update:
        write(plan, work / GGUF_WEIGHTS, update)
    for name in _KEPT:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, work / name)
    return facts
