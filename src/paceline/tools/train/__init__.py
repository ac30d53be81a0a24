"""Training a drafter for a target: prompts, the target's answers to them, and the learning.

Only the `paceline train` commands come here. `prompts` and `answers` need no more than running a
model does; `dflash` needs torch (the extra `train`).
"""
