"""Converts Hugging Face checkpoints to GGUF files, without torch.

`plan` checks a checkpoint whole, `write` makes the file. `families.py` has a row for each family.
"""

from paceline.models.to_gguf.write import WEIGHTS, Plan, plan, write

__all__ = ["WEIGHTS", "Plan", "plan", "write"]
