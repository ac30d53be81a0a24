import pytest

from paceline.models import ModelFiles
from support.networks import FORMS, Case, MakeCase


@pytest.fixture(scope="module")
def runtime() -> str:
    """Of the networks here; a file may have another."""
    return "openvino"


@pytest.fixture(scope="module")
def make_case(
    tiny_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory, runtime: str
) -> MakeCase:
    return lambda *form, **more: Case.make(
        tiny_files, tmp_path_factory.mktemp("drafter"), *form, runtime=runtime, **more
    )


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, make_case: MakeCase) -> Case:
    return make_case(*FORMS[request.param])


@pytest.fixture(scope="module")
def case(make_case: MakeCase) -> Case:
    return make_case()
