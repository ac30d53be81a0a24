"""Settings of pip and uv, as `pip config debug` and uv's documentation have them."""

import os
import sys
from pathlib import Path

import pytest

from paceline.errors import ModelError
from paceline.models.hub.index_settings import PYPI, IndexSettings, Source, read_settings
from support.errors import raises

NONE = {"PIP_CONFIG_FILE": os.devnull}


def index(url: str) -> Source:
    return Source(url, is_index=True)


def test_without_settings_the_public_index_is_used():
    assert read_settings(NONE) == IndexSettings((index(PYPI),))


def test_pips_variables_choose_indexes_folders_and_how_hosts_are_reached():
    index_settings = read_settings(
        NONE
        | {
            "PIP_INDEX_URL": "https://one/simple",
            "PIP_EXTRA_INDEX_URL": "https://two/simple  file:///three",
            "PIP_FIND_LINKS": "/wheels",
            "PIP_TRUSTED_HOST": "one two:8080",
            "PIP_CERT": "/authorities.pem",
            "PIP_PROXY": "proxy:3128",
            "PIP_DEFAULT_TIMEOUT": "60",
        }
    )
    assert index_settings == IndexSettings(
        sources=(
            Source("/wheels", is_index=False),
            index("https://one/simple"),
            index("https://two/simple"),
            index("file:///three"),
        ),
        trusted_hosts=("one", "two:8080"),
        certificates="/authorities.pem",
        proxy="http://proxy:3128",
        timeout=60,
    )


def test_no_index_leaves_the_folders_of_links():
    index_settings = read_settings(NONE | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "~/wheels"})
    assert index_settings.sources == (Source(str(Path.home() / "wheels"), is_index=False),)
    assert read_settings(NONE | {"PIP_NO_INDEX": "0"}).sources == (index(PYPI),)
    assert read_settings(NONE | {"UV_NO_INDEX": "true"}).sources == ()


def test_an_empty_variable_is_no_setting():
    assert read_settings(NONE | {"PIP_INDEX_URL": "", "UV_INDEX_URL": " "}) == IndexSettings()


def test_uvs_variables_count_where_pip_has_none():
    uv = {
        "UV_DEFAULT_INDEX": "corp=https://one/simple",
        "UV_INDEX": "https://two/simple",
        "UV_FIND_LINKS": "/a,/b",
        "UV_INSECURE_HOST": "one",
        "UV_HTTP_TIMEOUT": "30",
    }
    index_settings = read_settings(NONE | uv)
    assert index_settings.sources == (
        *(Source("/a", is_index=False), Source("/b", is_index=False)),
        *(index("https://one/simple"), index("https://two/simple")),
    )
    assert (index_settings.trusted_hosts, index_settings.timeout) == (("one",), 30)
    both = read_settings(NONE | uv | {"PIP_INDEX_URL": "https://pip/simple"})
    assert index("https://pip/simple") in both.sources
    assert index("https://one/simple") not in both.sources


def test_uv_offline_leaves_what_needs_no_network():
    index_settings = read_settings(
        NONE | {"UV_OFFLINE": "1", "PIP_FIND_LINKS": "/a https://b", "UV_INDEX": "file:///c"}
    )
    assert [source.url for source in index_settings.sources] == ["/a", "file:///c"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for the configuration of a machine, a user and an environment; all are empty."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "machine"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / ".config"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    for name in ("machine/pip", "home/.config/pip", "home/.pip", "prefix"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="the folders are those of Linux")
def test_files_of_machine_user_and_environment_override_each_other_in_this_order(folders: Path):
    files = ("machine/pip", "home/.pip", "home/.config/pip", "prefix")
    for name in files:
        path = folders / name / "pip.conf"
        path.write_text(f"[global]\nindex_url = https://{name}\n")
        assert read_settings({}).sources[0] == index(f"https://{name}"), path
    result = folders / "own.conf"
    result.write_text("[global]\nindex-url = https://own\n[download]\nfind-links =\n  /a\n  /b\n")
    sources = read_settings({"PIP_CONFIG_FILE": str(result)}).sources
    assert sources[-1] == index("https://own")
    assert [source.url for source in sources[:2]] == ["/a", "/b"]
    variables = {"PIP_CONFIG_FILE": str(result), "PIP_INDEX_URL": "https://variable"}
    assert read_settings(variables).sources[-1] == index("https://variable")


@pytest.mark.skipif(sys.platform != "linux", reason="the folders are those of Linux")
def test_a_file_in_the_environment_replaces_the_users(folders: Path):
    (folders / "home/.config/pip/pip.conf").write_text("[global]\nproxy = http://user:1\n")
    assert read_settings({}).proxy == "http://user:1"
    path = folders / "own.conf"
    path.touch()
    assert read_settings({"PIP_CONFIG_FILE": str(path)}).proxy is None
    assert read_settings({"PIP_CONFIG_FILE": os.devnull}).proxy is None


@pytest.mark.parametrize("content", [b"index-url = x\n", b"\xff\xfe", b"[global]\nx\n"])
def test_a_file_that_cannot_be_read_is_one_line(content: bytes, tmp_path: Path):
    path = tmp_path / "pip.conf"
    path.write_bytes(content)
    with raises(ModelError, "pip"):
        read_settings({"PIP_CONFIG_FILE": str(path)})


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_no_time_is_refused(text: str):
    with raises(ModelError, text):
        read_settings(NONE | {"PIP_TIMEOUT": text})
