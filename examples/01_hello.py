"""Ask a model one question."""

import paceline

with paceline.load() as model:
    sentence = "I get up at seven, make a pot of tea and buy some bread."
    print(model.generate(f"Rewrite in the past tense: {sentence}").text)
