"""Many requests at once over HTTP: every answer is the one that its request gets alone.

Eight clients ask the real model for chats and completions in every way there is to ask, find
beginnings of their prompts in the cache or not, and go away now and then. With PACELINE_WHOLE=1
they do so eight times as often, for longer answers, and with the neural drafter, too.
`test_hybrid_load.py` asks the same of tiny hybrid models.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.runtime.model import Model
from support.dflash import tiny_config, write_checkpoint
from support.load import Load, check_load, plain_answers

pytestmark = pytest.mark.real_model

WHOLE = bool(os.environ.get("PACELINE_WHOLE"))
LOAD = Load(1000, 48) if WHOLE else Load(120, 16)


@pytest.mark.slow
def test_every_answer_is_the_one_that_its_request_gets_alone(real_model: Model):
    check_load(real_model, LOAD, plain_answers(real_model, LOAD))


@pytest.mark.skipif(not WHOLE, reason="takes long: PACELINE_WHOLE=1")
def test_every_answer_of_a_hidden_state_drafter_is_the_one_that_its_request_gets_alone(
    real_model: Model, tmp_path: Path
):
    write_checkpoint(tmp_path, tiny_config(real_model.files))
    drafter = f"suffix+table+dflash:{tmp_path}"
    load = replace(LOAD, drafters=LOAD.drafters | {"suffix", "table", "dflash"})
    model = paceline.load(drafters=(drafter,), cache_tokens=4096)
    check_load(model, load, plain_answers(model, load), drafter)
