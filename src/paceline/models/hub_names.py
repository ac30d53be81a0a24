"""What a name of the Hugging Face hub means: repository, file or tag, and revision.

    owner/name                                             the model, in the form that runs here
    owner/name:Q4_K_M                                      its GGUF file of this quantization
    owner/name/path/file.gguf                              this file
    hf.co/owner/name...                                    each of these
    https://huggingface.co/owner/name/resolve/main/a.gguf  the address of a file (or blob, or raw)

Independent of the disk and of the network: it says what a name means, not whether it exists.
"""

import os
import re
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from paceline.errors import InvalidRequest, ModelNotFound

_PART = r"\w[\w.-]*"
_NAME = re.compile(rf"{_PART}/{_PART}")
_REPOSITORY = re.compile(rf"({_PART})/({_PART})(?::({_PART}))?")
_REVISION = re.compile(rf"{_PART}(?:/{_PART})*")
_SUFFIX = ".gguf"
_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
_OTHERS = ("datasets", "spaces", "kernels", "buckets", "collections", "papers")
"""First parts of an address that is not a model's."""
_FILE_ROUTES = ("resolve", "blob", "raw")
_LATEST = "latest"
"""The tag that means none, as in other programs."""


class HubName(NamedTuple):
    """A model on the hub."""

    repository: str
    """owner/name."""
    tag: str = ""
    """Selects one of its GGUF files; in any case."""
    file: str = ""
    """Path of a GGUF file in the repository."""
    revision: str | None = None
    """Branch, tag or commit; None: the main branch."""

    def __str__(self) -> str:
        """The name as it can be typed, without the revision."""
        if self.file:
            return f"{self.repository}/{self.file}"
        return f"{self.repository}:{self.tag}" if self.tag else self.repository

    def at(self, revision: str | None) -> "HubName":
        """Name at `revision`; itself if that is None.

        Raises InvalidRequest if the name has another one, or if it can be none.
        """
        if revision is None or revision == self.revision:
            return self
        if _REVISION.fullmatch(revision) is None:
            raise InvalidRequest(
                f"the revision is {revision!r}; expected a branch, a tag or a commit of the hub"
            )
        if self.revision is not None:
            raise InvalidRequest(
                f"the address of {self} has the revision {self.revision}, and --revision is "
                f"{revision}; leave one of them away"
            )
        return self._replace(revision=revision)


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form owner/name."""
    return _NAME.fullmatch(name) is not None


def parse_hub_name(name: str) -> HubName | None:
    """The model that `name` means; None if it has not the form of a hub name.

    Raises ModelNotFound for an address (`https://...`, `hf.co/...`) that is not a model's.
    """
    address = _address(name)
    if address is not None:
        return _of_address(name, address)
    owner, _, rest = name.partition("/")
    repository, slash, file = rest.partition("/")
    return None if slash and not file else _hub_name(f"{owner}/{repository}", file)


def _address(name: str) -> str | None:
    """`name` as an address with a scheme; None if it is not one."""
    if name.lower().startswith(("https://", "http://")):
        return name
    return f"https://{name}" if name.lower().partition("/")[0] in _HOSTS else None


def _of_address(name: str, address: str) -> HubName:
    try:
        split = urlsplit(address)
        host = split.hostname
    except ValueError:  # such as an IPv6 address without its end
        host = None
    if host is None or host not in (*_HOSTS, _endpoint_host()):
        raise ModelNotFound(
            f"{name} is not an address of the Hugging Face hub; expected one of "
            "https://huggingface.co, or the path of a downloaded file"
        )
    parts = [unquote(part) for part in split.path.split("/") if part]
    found = None
    if len(parts) >= 2 and parts[0] not in _OTHERS:
        found = _of_parts("/".join(parts[:2]), parts[2:])
    if found is None:
        raise ModelNotFound(
            f"{name} is not the address of a model on the hub; expected that of a repository or of "
            f"one of its {_SUFFIX} files"
        )
    return found


def _of_parts(repository: str, rest: Sequence[str]) -> HubName | None:
    """A repository, and what follows it in an address: a route, or a path in the repository."""
    if len(rest) > 1 and rest[0] in (*_FILE_ROUTES, "tree"):
        # refs/pr/7 and refs/convert/x are revisions of three parts.
        end = 4 if rest[1] == "refs" and len(rest) >= 4 else 2
        revision, file = "/".join(rest[1:end]), "/".join(rest[end:])
        if (rest[0] == "tree") == bool(file):
            return None
        found = _hub_name(repository, file)
        if found is None or _REVISION.fullmatch(revision) is None:
            return None
        return found._replace(revision=revision)
    return _hub_name(repository, "/".join(rest))


def _hub_name(repository: str, file: str) -> HubName | None:
    match = _REPOSITORY.fullmatch(repository)
    # A repository is not called x.gguf: that is a path whose file is not there.
    if match is None or match[2].lower().endswith(_SUFFIX):
        return None
    owner, name, tag = match.groups()
    if file:
        parts = file.split("/")
        if tag or not file.lower().endswith(_SUFFIX) or not all(map(_is_plain, parts)):
            return None
        return HubName(f"{owner}/{name}", file=file)
    return HubName(f"{owner}/{name}", tag="" if not tag or tag.lower() == _LATEST else tag)


def _is_plain(part: str) -> bool:
    """Whether a part of a path names a file or folder, without control characters."""
    return part not in ("", ".", "..") and part.isprintable() and "\\" not in part


def _endpoint_host() -> str | None:
    """Host of the hub that $HF_ENDPOINT names."""
    try:
        return urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname
    except ValueError:
        return None
