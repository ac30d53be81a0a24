#!/bin/sh
# Prepares a release: `sh deploy/release.sh 0.1.0`. Uploads nothing; docs/releasing.md has the rest.
set -eu
cd "$(dirname "$0")/.."
version=${1:?the version, such as 0.1.0}

fail() {
    echo "release: $1" >&2
    exit 1
}

[ -z "$(git status --porcelain)" ] || fail "there are changes that are not committed: git status"
grep -qx "version = \"$version\"" pyproject.toml || fail "pyproject.toml has another version than $version"
grep -qx "## $version, [0-9-]*" CHANGELOG.md || fail "CHANGELOG.md has no heading '## $version, YYYY-MM-DD'"
! git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null || fail "the tag v$version exists already"

sh .ci/run
echo "release: $version can go: git tag --sign v$version && git push origin v$version, then upload dist/*"
