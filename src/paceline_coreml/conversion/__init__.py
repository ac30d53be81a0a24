"""Converts models to Core ML artifacts in the Neural Engine's layout, and checks the result.

Needs torch, coremltools and transformers (the extra `coreml`), so only commands import it, inside a
function. `paceline_coreml.engine` runs the artifacts.
"""

import os

# coremltools and transformers draw a bar for every pass and file; ours shows the whole conversion.
os.environ.setdefault("TQDM_DISABLE", "1")
# transformers warns of fields of published configs, and that it makes missing weights at random,
# which `golden` names as an error.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
