#!/bin/sh
# Runs what only a Mac can tell, and writes one file to send back: `sh deploy/on_a_mac.sh [STEP...]`.
#
# A step that fails is noted, and the next one runs. With names only steps that begin so: `mlx serve`.
# Takes an hour or two and about 6 GB of disk. Variables:
#   MODEL    for the GPU (mlx-community/Qwen3-0.6B-4bit)
#   SMALL    for the Neural Engine (smollm2-135m)
#   PYTHON   to make an environment with (python3)
#   PACELINE an environment that is there, such as .venv: nothing is installed
#   REPORT   the file (mac-report.txt); LIMIT, seconds of a step (3600); PORT, of the server (8765)
set -u
cd "$(dirname "$0")/.."
model=${MODEL:-mlx-community/Qwen3-0.6B-4bit}
small=${SMALL:-smollm2-135m}
report=${REPORT:-mac-report.txt}
limit=${LIMIT:-3600}
port=${PORT:-8765}
environment=${PACELINE:-.venv-mac}
python=$environment/bin/python
only=" $* "
. deploy/steps.sh

system() {
    uname -srm
    if [ "$(uname -s)" = Darwin ]; then
        sw_vers
        sysctl -n machdep.cpu.brand_string hw.model hw.memsize hw.ncpu
    fi
    git rev-parse HEAD 2>/dev/null || echo "no git checkout"
}

install() {
    "${PYTHON:-python3}" -m venv "$environment" &&
        "$python" -m pip install --quiet --disable-pip-version-check -e '.[mlx,coreml]'
}

# Answers of eight clients, speculating, against each alone.
serve() {
    "$python" -m paceline serve --model "$1" --engine "$2" --port "$port" --quiet >"$work/server" 2>&1 &
    server=$!
    waited=0
    until curl --silent --fail --output /dev/null "http://127.0.0.1:$port/health"; do
        if ! kill -0 "$server" 2>/dev/null || [ "$waited" -ge "$limit" ]; then
            echo "the server did not start:"
            tail -5 "$work/server"
            kill "$server" 2>/dev/null
            server=""
            return 1
        fi
        sleep 1
        waited=$((waited + 1))
    done
    paceline verify --url "http://127.0.0.1:$port/v1"
    result=$?
    kill "$server"
    wait "$server"
    server=""
    return "$result"
}

: >"$report"
note "paceline on a Mac, $(date -u +%Y-%m-%dT%H:%M:%SZ)"
step "system" system
if [ -z "${PACELINE:-}" ]; then
    step "install" install
fi
need_python
step "system versions" versions

prompt="Count from one to twenty, in words."
step "mlx rules" rules "$model" mlx
step "mlx answer" paceline generate "$prompt" --model "$model" --engine mlx --max-tokens 64
step "mlx exactness" paceline verify --model "$model" --engine mlx
step "mlx exactness near thresholds" limited "$python" benchmarks/mlx_thresholds.py --model "$model"
step "mlx cost of calls" paceline plan --model "$model" --engine mlx --measure
step "mlx drafters" paceline bench run --model "$model" --engine mlx --drafter auto --drafter ngram --limit 8 --rounds 2
step "mlx several sequences" limited "$python" benchmarks/python_batch.py --model "$model" --engine mlx \
    --contexts 8 --prompts 8 --tokens 128 --rounds 2
step "mlx several sequences, plain" limited "$python" benchmarks/python_batch.py --model "$model" --engine mlx \
    --contexts 8 --prompts 8 --tokens 128 --rounds 2 --drafter none

for rows in 1 8 64; do
    step "coreml probe of a shape, $rows rows" paceline coreml probe \
        --shape "d=3072,heads=24,kv=8,dh=128,ff=8192,T=$rows,S=2048"
done
step "coreml probe of a layer" paceline coreml probe "$small" --layer 0
step "coreml convert" paceline convert "$small" --to coreml
step "coreml lint" paceline coreml lint "$small@coreml"
step "coreml residency" paceline coreml residency "$small@coreml"
# Core ML compiles at first use.
step "coreml first answer" paceline generate "$prompt" --model "$small" --engine coreml --max-tokens 64
step "coreml second answer" paceline generate "$prompt" --model "$small" --engine coreml --max-tokens 64
step "coreml golden" paceline coreml golden "$small@coreml"
step "coreml exactness" paceline verify --model "$small" --engine coreml
step "coreml cost of calls" paceline plan --model "$small" --engine coreml --measure
step "coreml drafters" paceline bench run --model "$small" --engine coreml --drafter auto --drafter ngram --limit 8 --rounds 2

step "serve mlx" serve "$model" mlx
step "serve coreml" serve "$small" coreml

finish
