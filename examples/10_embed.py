"""Find the text that is nearest to a question, by the vectors of an embedding model."""

import paceline

texts = ["Bread is baked.", "Ships float on water.", "Clocks show the time."]

with paceline.load("Qwen/Qwen3-Embedding-0.6B-GGUF:Q8_0", embeddings=True) as model:
    vectors = model.embed(texts)
    question = model.embed("What time is it?")
    likeness = vectors @ question  # cosines: vectors have the length 1
    print(texts[likeness.argmax()])
