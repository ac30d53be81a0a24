"""Converts Hugging Face checkpoints to GGUF files, without torch.

`plan` checks a checkpoint whole; `write` makes the file, `write_folder` a model folder with it.
`families.py` has a row for each family.
"""

from paceline.models.to_gguf.folder import write_folder
from paceline.models.to_gguf.writer import WEIGHTS, Plan, plan, write

__all__ = ["WEIGHTS", "Plan", "plan", "write", "write_folder"]
