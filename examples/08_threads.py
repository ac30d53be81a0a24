"""Use a model in several threads: answers that are asked for at the same time run together."""

from concurrent.futures import ThreadPoolExecutor

import paceline

questions = ["What is iron?", "What is gold?", "What is tin?"]

with paceline.load() as model, ThreadPoolExecutor() as pool:

    def ask(question: str) -> str:
        """Return the answer's text."""
        return model.generate(question, max_tokens=30, system="You are terse.").text

    for question, text in zip(questions, pool.map(ask, questions), strict=True):
        print(f"{question} {text.strip()}")
