"""Converts models to Core ML artifacts in the Neural Engine's layout, and checks the result.

This needs torch, coremltools and transformers (the extra `coreml`), so only commands import it,
inside a function. `paceline_coreml.engine` runs the artifacts.
"""

import os

# coremltools and transformers draw one bar per pass and file; ours shows the whole conversion.
os.environ.setdefault("TQDM_DISABLE", "1")
# transformers warns about fields of published configs, and about missing weights that it fills with
# random values, which `golden` reports as an error.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
