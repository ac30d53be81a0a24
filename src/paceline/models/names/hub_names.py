"""Parses names of the Hugging Face Hub: repository, GGUF file or tag, and revision.

    owner/name                                             the model, in a supported format
    owner/name:Q4_K_M                                      its GGUF file of this quantization
    owner/name/path/file.gguf                              this file
    hf.co/owner/name...                                    each of these
    https://huggingface.co/owner/name/resolve/main/a.gguf  the URL of a file (or blob, or raw)

A tag is the quantization in a file's name, in any case. Image projectors (mmproj), importance
matrices and drafters are also GGUF files, but not models. A model may be split into shards
(`-00001-of-00003.gguf`); the first stands for all.

Independent of disk and network: it parses a name and does not check that it exists.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from paceline.errors import InvalidRequest, ModelError, ModelNotFound
from paceline.storage.shards import SUFFIX, shard_of

_PART = r"\w[\w.-]*"
_NAME = re.compile(rf"{_PART}/{_PART}")
_MODEL = re.compile(rf"({_PART}/{_PART})(?::({_PART})|/(.+))?")
_ROUTE = re.compile(
    rf"(?P<repository>{_PART}/{_PART})/(?:resolve|blob|raw|tree)"
    rf"/(?P<revision>refs/{_PART}/{_PART}|{_PART})(?P<file>/.+)?"
)
"""Path of a URL with a revision; pull requests have revisions of three parts (refs/pr/7)."""
_REVISION = re.compile(rf"{_PART}(?:/{_PART})*")
_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
_OTHERS = ("datasets", "spaces", "kernels", "buckets", "collections", "papers")
"""First path parts of URLs that are not models."""
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q|TQ)\d(?:_[A-Z0-9]+)*|BF16|FP?(?:16|32)|(?:MX|NV)FP\d(?:_MOE)?)"
    r"(?=$|[-._/])",
    re.IGNORECASE,
)
_DYNAMIC = "UD-"
"""Prefix of the quantization of files whose tensors have several."""
_NO_MODELS = ("mmproj", "mtp-")
"""Parts of names of files that belong to a model: projectors, and drafting heads (from llama.cpp's
common/download.cpp, checked on 2026-11-22)."""
_DRAFTERS = ("eagle3", "dflash", "dspark")
"""Parts of names of drafters, which have their own repository, or belong to a model in it."""
_MATRIX = "imatrix"
_FIRST = ("Q4_K_M", "UD-Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "UD-Q4_K_XL", "Q4_1", "Q4_0")
"""Defaults without a tag, in this order; then another of 4 bits, Q8_0, or the only file."""


class HubName(NamedTuple):
    repository: str
    """owner/name."""
    tag: str = ""
    """Selects one of its GGUF files; case-insensitive."""
    file: str = ""
    """Path of a GGUF file in the repository."""
    revision: str | None = None
    """Branch, tag or commit; None: the main branch."""

    def __str__(self) -> str:
        """Return the name as a user can type it, without the revision."""
        if self.file:
            return f"{self.repository}/{self.file}"
        return f"{self.repository}:{self.tag}" if self.tag else self.repository

    def at_revision(self, revision: str | None) -> "HubName":
        """Return the name at `revision`; unchanged if None. Raises InvalidRequest on conflict."""
        if revision is None or revision == self.revision:
            return self
        if _REVISION.fullmatch(revision) is None:
            raise InvalidRequest(
                f"the revision is {revision!r}; expected a branch, a tag or a commit on the Hub"
            )
        if self.revision is not None:
            raise InvalidRequest(
                f"the URL of {self} has the revision {self.revision}, and --revision is "
                f"{revision}; remove one of them"
            )
        return self._replace(revision=revision)


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the format owner/name."""
    return _NAME.fullmatch(name) is not None


def parse_hub_name(name: str) -> HubName | None:
    """Return the model that `name` means; None if it is not a Hub name.

    Raises ModelNotFound for a URL (`https://...`, `hf.co/...`) that is not a model's.
    """
    first = name.lower().partition("/")[0]
    if first not in (*_HOSTS, "https:", "http:"):
        return _hub_name(name)
    model = _of_address(f"https://{name}" if first in _HOSTS else name)
    if model is None:
        raise ModelNotFound(
            f"{name} is not the URL of a model on the Hugging Face Hub; expected that of a "
            f"repository or of one of its {SUFFIX} files, or the path of a downloaded file"
        )
    return model


def _of_address(address: str) -> HubName | None:
    try:
        split = urlsplit(address)
        own_host = urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname
    except ValueError:  # such as an IPv6 address without its end
        return None
    path = unquote(split.path).strip("/")
    is_hub = split.hostname is not None and split.hostname in (*_HOSTS, own_host)
    if not is_hub or path.partition("/")[0] in _OTHERS:
        return None
    if route := _ROUTE.fullmatch(path):
        model = _hub_name(route["repository"] + (route["file"] or ""))
        return model and model._replace(revision=route["revision"])
    return _hub_name(path)


def _hub_name(text: str) -> HubName | None:
    match = _MODEL.fullmatch(text)
    if match is None:
        return None
    repository, tag, file = match.groups(default="")
    is_file = file.lower().endswith(SUFFIX) and all(map(_is_plain, file.split("/")))
    # A repository is not called x.gguf: that is the path of a missing file.
    if repository.lower().endswith(SUFFIX) or (file and not is_file):
        return None
    # In other apps this tag selects no file.
    return HubName(repository, "" if tag.lower() == "latest" else tag, file)


def _is_plain(part: str) -> bool:
    """Return whether a path component names a file or folder, without control characters."""
    return part not in ("", ".", "..") and part.isprintable() and "\\" not in part


def is_model(path: str) -> bool:
    """Return whether a file's name is that of a language model in GGUF."""
    name = path.rpartition("/")[2].lower()
    if not name.endswith(SUFFIX) or any(other in name for other in _NO_MODELS):
        return False
    # The name of a model quantized with a matrix may include it, after the quantization.
    return _MATRIX not in name or quantization(name) != ""


def quantization(path: str) -> str:
    """Return the quantization in a path's last part that has one, in upper case; else empty."""
    shard = shard_of(path)
    stem = path.removesuffix(SUFFIX) if shard is None else shard.stem
    labels: list[str] = _QUANTIZATION.findall(stem)
    return labels[-1].upper() if labels else ""


def models_of(paths: Iterable[str]) -> list[str]:
    """Return the sorted paths of the models among the files: whole files, and first shards."""
    models = sorted(
        path
        for path in paths
        if is_model(path) and ((shard := shard_of(path)) is None or shard.number == 1)
    )
    return [path for path in models if not any(x in path.lower() for x in _DRAFTERS)] or models


def choose(paths: Collection[str], tag: str, repository: str) -> str:
    """Return the path of the model that `tag` selects: a whole file, or a first shard.

    `tag` is a quantization, or a file's name; empty: Q4_K_M, else another of 4 bits, else Q8_0,
    else the only model. Raises ModelNotFound, with a list, if none or several match.
    """
    models = models_of(paths)
    if not models:
        raise ModelNotFound(f"{repository} has no GGUF file of a language model")
    matches = _tagged(models, tag) if tag else _default(models)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ModelNotFound(
            f"{repository} has several files for {tag or 'that name'}: {', '.join(matches)}; use "
            f"one of them, as in {repository}/{matches[0]}"
        )
    if tag:
        raise ModelNotFound(f"{repository} has no {tag}; it has {tags_of(models)}")
    raise ModelNotFound(
        f"{repository} has neither Q4 nor Q8_0; choose one of {tags_of(models)}, as in "
        f"{repository}:{tag_of(models[0], models)}"
    )


def shards_of(path: str, paths: Collection[str], repository: str) -> list[str]:
    """Return all files of a model, the first shard first. Raises ModelError if one is missing."""
    shard = shard_of(path)
    if shard is None:
        return [path]
    # Names that differ in case, as in `.GGUF`, are the repository's own.
    stored: Mapping[str, str] = {name.lower(): name for name in paths}
    shards = [stored.get(name.lower(), name) for name in shard.paths()]
    if missing := [name for name in shards if name not in paths]:
        raise ModelError(f"{repository} has {path}, but not {', '.join(missing)}")
    return shards


def tag_of(path: str, paths: Iterable[str]) -> str:
    """Return the shortest tag that selects the model `path` in a repository."""
    models, label = models_of(paths), quantization(path)
    return label if label and _tagged(models, label) == [path] else path.rpartition("/")[2]


def tags_of(models: Collection[str]) -> str:
    return ", ".join(tag_of(path, models) for path in models)


def is_exact(name: HubName, path: str) -> bool:
    """Return whether a tag is a file's name, its quantization, or all text after the model's."""
    tag, label = name.tag.upper(), quantization(path)
    shard = shard_of(path)
    stem = path.upper().removesuffix(SUFFIX.upper()) if shard is None else shard.stem.upper()
    stem = stem.rpartition("/")[2]
    model = stem.removesuffix(tag).rstrip("-._")
    same = (label, label.removeprefix(_DYNAMIC), stem, f"{stem}{SUFFIX.upper()}")
    return tag in ("", *same) or name.repository.partition("/")[2].upper().startswith(model)


def _tagged(models: Collection[str], tag: str) -> list[str]:
    """Return the models that `tag` selects, by the strictest rule that matches any."""
    label = tag.upper()
    whole = re.compile(rf"(?:^|[-._/]){re.escape(label)}(?=$|[-._/])")
    files = [label, f"{label}{SUFFIX.upper()}"]
    readings = (
        [path for path in models if path.upper() == label or path.upper().split("/")[-1] in files],
        [path for path in models if quantization(path) == label],
        [path for path in models if quantization(path) == _DYNAMIC + label],
        [path for path in models if whole.search(path.upper())],
    )
    return next(filter(None, readings), [])


def _default(models: Collection[str]) -> list[str]:
    labels = {path: quantization(path) for path in models}
    four_bits = sorted(
        {label for label in labels.values() if label.removeprefix(_DYNAMIC).startswith("Q4")}
    )
    for first in (*_FIRST, *four_bits, "Q8_0"):
        if matches := [path for path, label in labels.items() if label == first]:
            return matches
    return [*models] if len(models) == 1 else []
