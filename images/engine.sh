#!/usr/bin/env bash
# Makes sure that a Docker Engine answers, for tests on a machine that is all theirs (CI): as root on Debian it installs
# docker.io and starts dockerd in the background. One line says how that went; exit code 1 if there is no engine.
set -uo pipefail

LOG="${TMPDIR:-/tmp}/aglite-dockerd.log"

give_up() {
    printf 'no Docker Engine: %s; the tests that need one are skipped\n' "$1"
    exit 1
}

answers() { docker version >/dev/null 2>&1; }

if answers; then
    printf 'the Docker Engine %s answers\n' "$(docker version --format '{{.Server.Version}}')"
    exit
fi
[ "$(id -u)" = 0 ] || give_up "none answers, and only root can start one"
if ! command -v dockerd >/dev/null; then
    command -v apt-get >/dev/null || give_up "dockerd is not installed, and this is no Debian"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends docker.io iptables; } \
        >"$LOG" 2>&1 || give_up "docker.io could not be installed (see $LOG)"
fi
setsid nohup dockerd >>"$LOG" 2>&1 </dev/null &
for _ in $(seq 60); do
    if answers; then
        printf 'started a Docker Engine %s, its log is %s\n' "$(docker version --format '{{.Server.Version}}')" "$LOG"
        exit
    fi
    sleep 0.5
done
give_up "dockerd does not start: $(tail -n 1 "$LOG")"
