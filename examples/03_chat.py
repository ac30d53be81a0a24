"""Talk for two turns; the oldest ones are dropped when the context is full."""

import paceline
from paceline.errors import ContextFull

with paceline.load() as model:
    chat = model.conversation([{"role": "system", "content": "You are terse."}])
    for question in ("What is a glacier?", "And how fast does it move?"):
        print(f"> {question}")
        try:
            stream = chat.send(question, max_tokens=40)
        except ContextFull as full:  # nothing has changed
            if full.turns is None:
                raise  # the question alone is too long
            chat.drop_oldest(full.turns)
            stream = chat.send(question, max_tokens=40)
        for step in stream:
            print(step.text, end="", flush=True)
        print()
    chat.close()
