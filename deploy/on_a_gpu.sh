#!/bin/sh
# Runs what only a GPU can tell, and writes one file to send back: `sh deploy/on_a_gpu.sh [STEP...]`.
#
# A step that fails is noted, and the next one runs. With names only steps that begin so: `llamacpp mlx`.
# It ends after ten minutes and needs no network, but a folder, made where there is one, with
#   wheels: `pip wheel --wheel-dir gpu '.[cuda]'`
#   a GGUF file, a folder of safetensors for mlx, and Spec-Bench's questions, *.jsonl
#   lib/, a build of llama.cpp's library for the GPU (docs/gpus.md)
# Variables:
#   FOLDER   that folder (gpu)
#   GGUF, CHECKPOINT, SUITE, LLAMA_CPP_LIB_PATH   instead of what is in it
#   DEVICE   for llamacpp (gpu)
#   PYTHON   to make an environment with (python3)
#   PACELINE an environment that is there, such as .venv: nothing is installed
#   REPORT   the file (gpu-report.txt); TOTAL, seconds of all steps (600)
set -u
cd "$(dirname "$0")/.."
folder=${FOLDER:-gpu}
first() {
    [ ! -e "$1" ] || printf '%s' "$1"
}
gguf=${GGUF:-$(first "$folder"/*.gguf)}
gguf=${gguf:-$folder/MODEL.gguf}
config=$(first "$folder"/*/config.json)
checkpoint=${CHECKPOINT:-${config%/config.json}}
checkpoint=${checkpoint:-$folder/CHECKPOINT}
suite=${SUITE:-$(first "$folder"/*.jsonl)}
[ ! -d "$folder/lib" ] || export LLAMA_CPP_LIB_PATH="${LLAMA_CPP_LIB_PATH:-$folder/lib}"
device=${DEVICE:-gpu}
report=${REPORT:-gpu-report.txt}
environment=${PACELINE:-.venv-gpu}
python=$environment/bin/python
only=" $* "
. deploy/steps.sh

end=$(($(date +%s) + ${TOTAL:-600}))
export HF_HUB_OFFLINE=1 PIP_NO_INDEX=1

# Run a step: its limit in seconds, then the step; no longer than all steps have.
within() {
    limit=$1
    shift
    left=$((end - $(date +%s)))
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -gt 0 ]; then
        step "$@"
    else
        step "$1" echo_no_time
    fi
}

echo_no_time() {
    echo "no time was left"
    return 124
}

system() {
    uname -srm
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1 ||
        ls /dev/dri 2>&1 || true
    git rev-parse HEAD 2>/dev/null || echo "no git checkout"
    echo "file $gguf, checkpoint $checkpoint, suite ${suite:-paceline's own}"
    echo "library ${LLAMA_CPP_LIB_PATH:-that of the wheel}"
}

install() {
    "${PYTHON:-python3}" -m venv "$environment" &&
        limited "$python" -m pip install --quiet --disable-pip-version-check --find-links "$folder" 'paceline[cuda]'
}

# Classes of rows and milliseconds of calls; what was measured before the limit is shown, too.
rows() {
    limited "$python" benchmarks/gpu_rows.py "$gguf" --keys 100 1100 4090 --caches f16:f16 --out "$work/rows.json"
    result=$?
    cat "$work/rows.json" 2>/dev/null
    return "$result"
}

# Two questions of each of Spec-Bench's six kinds, with drafts and plain.
bench() {
    paceline bench run "$@" ${suite:+--suite "$suite"} --drafter auto --limit 12 --rounds 1 --max-tokens 64
}

: >"$report"
note "paceline on a GPU, $(date -u +%Y-%m-%dT%H:%M:%SZ)"
within 10 "system" system
if [ -z "${PACELINE:-}" ]; then
    within 90 "install" install
fi
need_python
within 10 "system versions" versions

within 60 "llamacpp plan" paceline plan --model "$gguf" --engine llamacpp --device "$device" --measure
within 90 "llamacpp classes and costs by rows" rows
within 70 "llamacpp exactness" paceline verify --quick --model "$gguf" --engine llamacpp --device "$device"
within 70 "llamacpp drafters" bench --model "$gguf" --engine llamacpp --device "$device"

within 30 "mlx rules" rules "$checkpoint" mlx
within 60 "mlx cost of calls" paceline plan --model "$checkpoint" --engine mlx --measure
within 50 "mlx exactness near thresholds" limited "$python" benchmarks/mlx_thresholds.py --model "$checkpoint"
within 70 "mlx exactness" paceline verify --quick --model "$checkpoint" --engine mlx
within 70 "mlx drafters" bench --model "$checkpoint" --engine mlx

finish
