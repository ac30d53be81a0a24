"""Making Core ML artifacts: models in the Neural Engine's layout, converted, checked and compared.

A workshop with heavy tools (torch, coremltools, transformers, all in the extra `coreml`): nothing
imports it but its own commands, inside a function. What it makes is run by `engines/coreml`.
"""

import os

# coremltools and transformers draw a bar for every pass and file; ours says how far the whole is.
os.environ.setdefault("TQDM_DISABLE", "1")
