# What `on_a_mac.sh` and `on_a_gpu.sh` share, read by both: steps, each with a limit and a note of how it
# ended, in one report. They set `python`, `report` and `only` before, and `limit`, the seconds of a step.
failed=""
work=$(mktemp -d)
server=""
trap '[ -z "$server" ] || kill "$server" 2>/dev/null; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

note() {
    printf '%s\n' "$*" | tee -a "$report"
}

# Run a command for at most `limit` seconds.
limited() {
    "$python" - "$limit" "$@" <<'END'
import subprocess
import sys

try:
    sys.exit(subprocess.run(sys.argv[2:], timeout=float(sys.argv[1]), check=False).returncode)
except subprocess.TimeoutExpired:
    print(f"stopped after {sys.argv[1]} seconds")
    sys.exit(124)
END
}

paceline() {
    limited "$python" -m paceline "$@"
}

# Run a step, append what it prints, and note how it ended.
step() {
    name=$1
    shift
    case $only in
    "  " | *" ${name%% *} "*) ;;
    *) return 0 ;;
    esac
    note ""
    note "== $name: $*"
    begun=$(date +%s)
    "$@" >"$work/output" 2>&1
    status=$?
    # No name of a person: paths of the home folder are shortened.
    sed "s|$HOME|~|g" "$work/output" | tee -a "$report"
    note "-- $name: exit status $status after $(($(date +%s) - begun)) seconds"
    [ "$status" -eq 0 ] || failed="$failed
  $name"
}

# End with a note if there is no environment to run in.
need_python() {
    [ -x "$python" ] || {
        note "$python is missing; run the step install, or set PACELINE to an environment with paceline"
        exit 1
    }
}

versions() {
    "$python" -m pip list --disable-pip-version-check 2>/dev/null |
        grep -i -E '^(paceline|mlx|xllamacpp|coremltools|numpy|torch|transformers)'
    "$python" --version
}

# Rows of a call, and of one of several sequences, that were measured as equal.
rules() {  # MODEL ENGINE
    limited "$python" -c '
import sys
from time import perf_counter

import paceline

started = perf_counter()
with paceline.load(sys.argv[1], engine=sys.argv[2]) as loaded:
    print(f"opened in {perf_counter() - started:.1f} s")
    for name, value in loaded.engine.describe().items():
        print(f"{name}: {value}")
    print("compared up to", loaded.engine.compared_keys, "tokens")
    print("exact:", all(rows.holds for rows in loaded.compared().values()))
' "$1" "$2"
}

# Note what failed; the status of the whole.
finish() {
    note ""
    if [ -n "$failed" ]; then
        note "Steps that failed:$failed"
    else
        note "No step failed."
    fi
    echo "Please send $report back."
    [ -z "$failed" ]
}
