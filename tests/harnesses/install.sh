#!/usr/bin/env bash
# Installs the agent programs that the tests here drive, in exactly the versions that the presets were made for:
#
#   bash tests/harnesses/install.sh FOLDER     then AGLITE_HARNESSES=FOLDER python -m pytest tests/harnesses
#
# About 2.2 GB. What is there already is kept. A program that cannot be installed is named and left out (its tests are
# skipped); the exit code is then 1. Settings: PYTHON (3.11 or 3.12), PYTHON312 (OpenHands wants 3.12 or newer).
set -uo pipefail

FOLDER="$(mkdir -p "${1:?name a folder}" && cd "$1" && pwd)"
MINI=(mini-swe-agent==2.4.6 litellm==1.110.2)
OPENHANDS=(openhands==1.16.0 litellm==1.110.2)
NODE=(opencode-ai@1.18.33 @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197)
LEFT_OUT=0

left_out() {
    printf 'left out: %s (%s)\n' "$1" "$2" >&2
    LEFT_OUT=1
}

# kept NAME WHAT...: whether NAME was installed before from just this
kept() { [ "$(cat "$FOLDER/.$1" 2>/dev/null)" = "${*:2}" ]; }
installed() { printf '%s' "${*:2}" >"$FOLDER/.$1"; }

# quickly ENVIRONMENT REQUIREMENT...: with uv, which takes a fifth of pip's time; with pip where uv finds no index
quickly() {
    local python="$1/bin/python" pip
    shift
    pip="$python -m pip install --disable-pip-version-check --progress-bar off"
    { $pip uv==0.13.9 && "$python" -m uv pip install --python "$python" "$@"; } || $pip "$@"
}

# from_pypi NAME PYTHON REQUIREMENT...: a virtual environment FOLDER/NAME
from_pypi() {
    local name="$1" python="$2" log="$FOLDER/$1.log"
    shift 2
    kept "$name" "$@" && return
    if [ -z "$python" ]; then
        left_out "$name" "its version of Python is not here"
    elif "$python" -m venv --clear "$FOLDER/$name" >"$log" 2>&1 && quickly "$FOLDER/$name" "$@" >>"$log" 2>&1; then
        installed "$name" "$@"
    else
        left_out "$name" "$(tail -n 1 "$log"); all of it: $log"
    fi
}

# first PROGRAM...: the first of these interpreters that runs and is new enough
first() {
    local least="$1" candidate
    shift
    for candidate in "$@"; do
        [ -n "$candidate" ] && "$candidate" -c "import sys; sys.exit(sys.version_info < ($least))" 2>/dev/null &&
            printf '%s' "$candidate" && return
    done
}

from_npm() {
    local log="$FOLDER/node.log"
    kept node "${NODE[@]}" && return
    if ! command -v npm >/dev/null; then
        left_out "opencode, codex, claude-code" "npm is not here"
    elif npm install --prefix "$FOLDER/node" --no-audit --no-fund --no-progress "${NODE[@]}" >"$log" 2>&1; then
        installed node "${NODE[@]}"
    else
        left_out "opencode, codex, claude-code" "$(grep -m 1 -i error "$log"); all of it: $log"
    fi
}

# Downloading and unpacking wait for different things, so all at once.
from_npm &
NPM=$!
from_pypi mini-swe-agent "$(first 3,11 "${PYTHON:-}" python3.11 python3)" "${MINI[@]}"
from_pypi openhands "$(first 3,12 "${PYTHON312:-}" python3.12 python3.13 "$HOME"/.pyenv/versions/3.12*/bin/python)" \
    "${OPENHANDS[@]}"
wait "$NPM"
for program in node/node_modules/.bin/{opencode,codex,claude} {mini-swe-agent/bin/mini,openhands/bin/openhands}; do
    [ -x "$FOLDER/$program" ] || LEFT_OUT=1
done
exit "$LEFT_OUT"
