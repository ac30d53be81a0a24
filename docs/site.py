"""The site's pages keep the paths that they have in the repository, so one link serves both.

MkDocs runs `on_files` before it reads any page (https://www.mkdocs.org/user-guide/configuration/#hooks).
A page that is in no navigation fails the strict build.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

# Addresses that a browser loads without a click.
LOADED = re.compile(
    r'<(?:script|img|iframe|link rel="?(?:stylesheet|preconnect))[^>]*"(https?://[^"]*)"'
)
ROOT = Path(__file__).parents[1]
PUBLISHED = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/**/*.png",
    "docs/**/*.svg",
    "docs/**/*.html",
    "benchmarks/*.md",
    "benchmarks/results/*.json",
    "benchmarks/results/charts/*.png",
    "recipes/*/README.md",
    "src/paceline/drafters/shipped/**/manifest.json",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files and the repository's published ones, by their paths in it."""
    theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted({path for pattern in PUBLISHED for path in ROOT.glob(pattern)})
    ours = [
        File(
            path.relative_to(ROOT).as_posix(),
            src_dir=str(ROOT),
            dest_dir=config.site_dir,
            use_directory_urls=config.use_directory_urls,
        )
        for path in paths
    ]
    return Files([*theme, *ours])


def on_post_page(output: str, page: Any, config: MkDocsConfig) -> str:
    """The page as it is. Raises PluginError if a browser would load a part of it from elsewhere."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {found[1]}; keep a copy in docs/ instead")
    return output
