"""Ask a model one question."""

import paceline

with paceline.load() as model:
    print(model.generate("Why is the sky blue?", max_tokens=60).text)
