#!/usr/bin/env bash
# From a fresh clone to a training run.
#
#   bash quickstart.sh [OPTIONS OF aglite up]   install, fetch the demo model, start `aglite up recipes/instruct`
#   bash quickstart.sh install                  only install
#   bash quickstart.sh test [OPTIONS OF pytest] install what the tests need and run them
#
# Running it again is quick: what is there already is kept. Settings: PYTHON (interpreter, 3.11), AGLITE_CACHE (models),
# AGLITE_EXTRAS (cpu or gpu: what to install; by default gpu where there is an NVIDIA GPU),
# AGLITE_HARNESSES (a folder with the agent programs that the tests drive; by default they are installed into the cache),
# AGLITE_TORCH_INDEX (package index that has torch for the CPU; empty: only the indexes that pip knows).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")"

VENV=".venv"
LOG="$VENV/install.log"
TIMES=()
MOST_AGAIN=5

say() { printf '%s\n' "$*"; }

# one clear sentence, and what to do
fail() {
    printf 'quickstart: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  -> %s\n' "$2" >&2
    exit 1
}

# stage NAME COMMAND...: run it and note how long it took
stage() {
    local name="$1" start=$SECONDS
    shift
    "$@"
    TIMES+=("$name $((SECONDS - start)) s")
}

# Whether this machine has an NVIDIA GPU: by its driver's own tool or, in a container without it, by the kernel.
has_gpu() {
    local list one
    if command -v nvidia-smi >/dev/null && list="$(nvidia-smi -L 2>/dev/null)" && [[ "$list" == GPU* ]]; then
        return 0
    fi
    for one in /proc/driver/nvidia/gpus/*; do
        [ ! -e "$one" ] || return 0
    done
    return 1
}

# EXTRA (cpu or gpu), and what differs between the two: torch, the index that has it, disk
choose_extra() {
    EXTRA="${AGLITE_EXTRAS:-}"
    [ -n "$EXTRA" ] || { if has_gpu; then EXTRA=gpu; else EXTRA=cpu; fi; }
    case "$EXTRA" in
    cpu)
        TORCH="torch==2.13.0"
        TORCH_INDEX="${AGLITE_TORCH_INDEX-https://download.pytorch.org/whl/cpu}"
        NEEDED_MB="${AGLITE_NEEDED_MB:-8000}"
        ;;
    gpu)
        TORCH="torch==2.11.0"
        TORCH_INDEX=""
        NEEDED_MB="${AGLITE_NEEDED_MB:-20000}"
        [ -n "${AGLITE_EXTRAS:-}" ] || say "there is an NVIDIA GPU: installing for it (AGLITE_EXTRAS=cpu does without)"
        ;;
    *) fail "AGLITE_EXTRAS is '$EXTRA'; it can be cpu or gpu." "leave it out to let this script see what is there" ;;
    esac
}

find_python() {
    local candidate version found=""
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        [ -n "$candidate" ] || continue
        # a name that is missing, or a pyenv shim without a Python behind it, prints nothing
        version="$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue
        if [ "$version" = "3.11" ]; then
            PYTHON_FOUND="$candidate"
            return
        fi
        found="$found $candidate is $version,"
    done
    [ -z "$found" ] || fail "Python 3.11 is needed, but$found and none is 3.11." \
        "install it (Debian 12: apt install python3.11 python3.11-venv), or name one: PYTHON=/path/to/python3.11 bash quickstart.sh"
    fail "no Python found; Python 3.11 is needed." "apt install python3.11 python3.11-venv"
}

check_disk() {
    local free
    free="$(df -Pm . | awk 'NR == 2 { print $4 }')"
    [ "$free" -ge "$NEEDED_MB" ] ||
        fail "$free MB free on this disk, about $NEEDED_MB MB are needed." "free some disk, or clone to another one"
}

make_venv() {
    local output
    if ! output="$("$PYTHON_FOUND" -m venv --clear "$VENV" 2>&1)"; then
        case "$output" in
        *ensurepip* | *"No module named venv"*)
            fail "this Python cannot make virtual environments (its venv module is not whole)." "apt install python3.11-venv"
            ;;
        *"No space left"*) fail "the disk is full." "free some disk and run this again" ;;
        *) fail "making $VENV failed: ${output##*$'\n'}" ;;
        esac
    fi
}

# pip_install ARGUMENTS...: the larger downloads on the screen, everything in the log
pip_install() {
    if ! "$VENV/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 |
        tee -a "$LOG" | sed -un 's/^ *Downloading \([^ ]*\) \((.* MB)\).*/  downloading \1 \2/p; s/^Installing collected.*/  unpacking .../p'; then
        pip_failed
    fi
}

pip_failed() {
    if grep -q "No space left" "$LOG"; then
        fail "the disk filled up while installing." "free some disk and run this again"
    fi
    if grep -Eq "NewConnectionError|Name or service not known|name resolution|Connection refused|unreachable|ProxyError|timed out" "$LOG"; then
        fail "the package index cannot be reached." "check the network (or pip's settings) and run this again; the log is $LOG"
    fi
    grep -v '^ *$' "$LOG" | tail -n 5 >&2
    fail "pip failed; its last lines are above, all of them in $LOG."
}

# the index for CPU builds of torch, if there is one and it answers (pip would retry for minutes)
torch_index() {
    [ -n "$TORCH_INDEX" ] || return 0
    if "$VENV/bin/python" - "$TORCH_INDEX" 2>/dev/null <<'PY'; then
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1].rstrip("/") + "/torch/", method="HEAD"), timeout=5)
PY
        printf -- '--extra-index-url=%s' "$TORCH_INDEX"
    fi
}

install_torch() {
    local index
    index="$(torch_index)"
    say "installing $TORCH ($EXTRA)"
    pip_install ${index:+"$index"} "$TORCH"
}

install_aglite() {
    say "installing aglite and what it needs ($1)"
    pip_install "$TORCH" -e ".[$1]"
}

# install [EXTRAS]: make or keep .venv with cpu or gpu, and EXTRAS; a stamp says what was installed into it
install() {
    local extras stamp wanted
    choose_extra
    extras="$EXTRA${1:+,$1}"
    stage python find_python
    wanted="$(cat pyproject.toml quickstart.sh | cksum) $("$PYTHON_FOUND" -VV) $PWD"
    stamp="$VENV/.installed-$extras"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && "$VENV/bin/python" -c "" 2>/dev/null; then
        say "$VENV is up to date"
        return
    fi
    check_disk
    if ! { [ -f "$VENV/.python" ] && [ "$(cat "$VENV/.python")" = "$("$PYTHON_FOUND" -VV) $PWD" ] &&
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1; }; then
        say "making $VENV with $PYTHON_FOUND"
        stage venv make_venv
        printf '%s' "$("$PYTHON_FOUND" -VV) $PWD" >"$VENV/.python"
    fi
    : >"$LOG"
    rm -f "$VENV"/.installed-*
    stage torch install_torch
    stage packages install_aglite "$extras"
    printf '%s' "$wanted" | tee "$stamp" >"$VENV/.installed-$EXTRA" # every set of extras holds one of the two
}

fetch_model() {
    "$VENV/bin/aglite" model fetch smollm2-135m
}

# the demo model, for the tests that want a real one
test_model() {
    AGLITE_DEMO_MODEL="$(fetch_model)"
    export AGLITE_DEMO_MODEL
    say "$AGLITE_DEMO_MODEL"
}

# agent_programs ARGUMENTS OF pytest: what tests/harnesses drives, for a run of all tests or of those. No test needs them:
# what cannot be installed is named, and its tests are skipped.
agent_programs() {
    [ "$#" -eq 0 ] || [[ "$*" == *harness* ]] || return 0
    [ -z "${AGLITE_HARNESSES:-}" ] || return 0
    export AGLITE_HARNESSES="${AGLITE_CACHE:-$HOME/.cache/aglite}/harnesses"
    say "agent programs for tests/harnesses, in $AGLITE_HARNESSES"
    PYTHON="$PYTHON_FOUND" bash tests/harnesses/install.sh "$AGLITE_HARNESSES" 2>&1 ||
        say "the tests of what was left out are skipped"
}

# All tests: as many files at a time as there are cores, in the order in which they come. Many of them start processes and
# containers and hold them to limits of time, which other work on the machine can upset. So a few that failed have one
# more try, by themselves; what passes only then is named, because it may be a fault that shows itself now and then.
all_tests() {
    local code=0 record=.pytest_cache/v/cache/lastfailed failed
    rm -f "$record"
    "$VENV/bin/python" -m pytest --numprocesses logical --dist loadfile --no-loadscope-reorder || code=$?
    [ "$code" -eq 1 ] && [ -f "$record" ] || exit "$code"
    mapfile -t failed < <(sed -n 's/^ *"\(.*\)": true,*$/\1/p' "$record")
    [ "${#failed[@]}" -le "$MOST_AGAIN" ] || exit "$code"
    printf 'failed beside other tests, so once more by itself: %s\n' "${failed[@]}"
    "$VENV/bin/python" -m pytest --last-failed --last-failed-no-failures none || exit 1
    printf 'UNSTEADY, failed once and then passed: %s\n' "${failed[@]}"
}

print_times() {
    local IFS=,
    say "time: ${TIMES[*]}; $SECONDS s in all" | sed 's/,/, /g'
}

case "${1:-up}" in
install)
    install
    print_times
    say "installed; next: bash quickstart.sh, or $VENV/bin/aglite --help"
    ;;
test)
    shift
    install test
    stage model test_model
    stage agents agent_programs "$@"
    print_times
    [ "$#" -eq 0 ] || exec "$VENV/bin/python" -m pytest "$@"
    all_tests
    ;;
-h | --help | help)
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    ;;
*)
    install
    stage model fetch_model
    print_times
    if [ -t 1 ]; then
        exec "$VENV/bin/aglite" up recipes/instruct "$@"
    else
        exec "$VENV/bin/aglite" up recipes/instruct --headless "$@"
    fi
    ;;
esac
