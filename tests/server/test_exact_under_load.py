"""Many requests at once over HTTP: every answer is the one that its request gets alone.

Eight clients ask the real model for chats and completions in every way there is to ask, find
beginnings of their prompts in the cache or not, and go away now and then. With PACELINE_WHOLE=1
they do so eight times as often, and for longer answers.
`test_hybrid_load.py` asks the same of tiny hybrid models.
"""

import os

import pytest

from paceline.runtime.model import Model
from support.load import Load, check_load, plain_answers

pytestmark = pytest.mark.real_model

WHOLE = bool(os.environ.get("PACELINE_WHOLE"))
LOAD = Load(1000, 48) if WHOLE else Load(120, 16)


@pytest.mark.slow
def test_every_answer_is_the_one_that_its_request_gets_alone(real_model: Model):
    check_load(real_model, LOAD, plain_answers(real_model, LOAD))
