#!/usr/bin/env bash
# Builds the images that agents run in, named aglite/NAME:
#
#   bash images/build.sh [--offline] [NAME...]     default: python
#
# NAME: python (a small base with the openai SDK), mini-swe-agent, openhands, opencode, codex, claude-code.
# As usual an image is built by its Dockerfile, from a base image that Docker pulls: from Docker Hub or the registry
# and folder in AGLITE_REGISTRY (such as localhost:5000/library). With --offline no container registry is needed: the base
# comes from debootstrap (as root), its programs from PyPI and npm. Settings of --offline: AGLITE_SUITE (Debian release,
# trixie), AGLITE_MIRROR (http://deb.debian.org/debian).
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
SUITE="${AGLITE_SUITE:-trixie}"
NPM=10.9.2
MIRROR="${AGLITE_MIRROR:-http://deb.debian.org/debian}"

fail() {
    printf 'images/build.sh: %s\n' "$1" >&2
    [ $# -lt 2 ] || printf '  -> %s\n' "$2" >&2
    exit 1
}

# What goes into an image: KIND (pypi or npm), PACKAGES, and the DEBIAN packages besides the language
describe() {
    PIP_OPTIONS=()
    case "$1" in
    python) KIND=pypi DEBIAN=() PACKAGES=("openai>=3") ;;
    mini-swe-agent) KIND=pypi DEBIAN=(git) PACKAGES=(mini-swe-agent==2.4.6 litellm==1.110.2) ;;
    openhands) KIND=pypi DEBIAN=(git tmux) PACKAGES=(openhands==1.16.0 litellm==1.110.2)
        # it names no other Python than 3.12, which no Debian has
        PIP_OPTIONS=(--ignore-requires-python) ;;
    opencode) KIND=npm DEBIAN=(git ripgrep) PACKAGES=(opencode-ai@1.18.33) ;;
    codex) KIND=npm DEBIAN=(git ripgrep) PACKAGES=(@openai/codex@0.171.0) ;;
    claude-code) KIND=npm DEBIAN=(git ripgrep) PACKAGES=(@anthropic-ai/claude-code@2.1.197) ;;
    *) fail "there is no image $1" "one of: python mini-swe-agent openhands opencode codex claude-code" ;;
    esac
}

online() {
    local file="$HERE/$1/Dockerfile" from=()
    [ -f "$file" ] || file="$HERE/node/Dockerfile"
    [ -z "${AGLITE_REGISTRY:-}" ] || from=(--build-arg "BASE=$AGLITE_REGISTRY/$(sed -n 's/^ARG BASE=//p' "$file")")
    docker build --tag "aglite/$1" --build-arg "PACKAGES=${PACKAGES[*]}" "${from[@]}" --file "$file" "$HERE"
}

# A Debian with a language and more, in a folder: images that want the same have a copy of the first one's
base() {
    local folder="$1" language=python3 log made
    [ "$KIND" = pypi ] || language=nodejs
    made="$WORK/$(printf '%s-' debian "$language" "${DEBIAN[@]}")"
    if [ ! -d "$made" ]; then
        log="$(mktemp)"
        [ -d "$WORK/debian" ] ||
            debootstrap --variant=minbase --include=ca-certificates "$SUITE" "$WORK/debian" "$MIRROR" >"$log" 2>&1 ||
            fail "debootstrap failed: $(tail -n 1 "$log")" "look into $log"
        cp -a "$WORK/debian" "$made"
        # what runs in it meanwhile trusts whom this machine trusts
        cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$made/tmp/trusted.crt"
        cp -L /etc/resolv.conf "$made/etc/resolv.conf"
        inside "$made" sh -c 'apt-get update && apt-get install -y --no-install-recommends "$@"' \
            sh "$language" "${DEBIAN[@]}" >>"$log" 2>&1 || fail "apt-get failed: $(tail -n 1 "$log")" "look into $log"
        rm "$log"
    fi
    cp -a "$made" "$folder"
}

# inside FOLDER COMMAND...: run it in there, with this machine's certificates, and /proc, where programs find themselves
inside() {
    local folder="$1"
    shift
    env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/tmp LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
        PIP_CERT=/tmp/trusted.crt NODE_EXTRA_CA_CERTS=/tmp/trusted.crt \
        unshare --mount sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$folder" "$@"
}

offline() {
    local name="$1" folder="$WORK/root"
    base "$folder"
    if [ "$KIND" = pypi ]; then
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder/tmp" pip
        inside "$folder" sh -c 'python3 "$(echo /tmp/pip-*.whl)/pip" install --quiet --no-cache-dir --no-compile \
            --break-system-packages --root-user-action=ignore "$@"' sh "${PIP_OPTIONS[@]}" "${PACKAGES[@]}"
        ln -sf python3 "$folder/usr/bin/python"
    else
        # Debian's npm would bring hundreds of packages
        python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' \
            "https://registry.npmjs.org/npm/-/npm-$NPM.tgz" "$folder/tmp/npm.tgz"
        tar -C "$folder/tmp" -xzf "$folder/tmp/npm.tgz"
        inside "$folder" node /tmp/package/bin/npm-cli.js install --global --prefix /usr/local --cache /tmp/cache \
            --no-audit --no-fund --no-progress --no-update-notifier --fetch-retries=5 "${PACKAGES[@]}"
    fi
    # what no agent reads
    rm -rf "$folder"/tmp/* "$folder"/var/cache/apt/* "$folder"/var/lib/apt/lists/* "$folder"/var/log/* \
        "$folder"/usr/share/{doc,man,info,locale,lintian} "$folder/etc/resolv.conf"
    : >"$folder/etc/resolv.conf"
    tar --numeric-owner --sort=name -C "$folder" -c . | docker import --change "ENV LANG=C.UTF-8" - "aglite/$name" >/dev/null
    rm -rf "$folder"
    docker image ls --format '{{.Repository}} {{.Size}}' "aglite/$name"
}

MODE=online
NAMES=()
for argument in "$@"; do
    case "$argument" in
    --offline) MODE=offline ;;
    -h | --help)
        sed -n '2,12s/^# \{0,1\}//p' "$0"
        exit
        ;;
    *) NAMES+=("$argument") ;;
    esac
done
[ ${#NAMES[@]} -gt 0 ] || NAMES=(python)
command -v docker >/dev/null || fail "docker is not installed" "Debian: apt install docker.io"
docker version >/dev/null 2>&1 || fail "the Docker Engine does not answer" "start it, or add yourself to the group docker"
if [ "$MODE" = offline ]; then
    [ "$(id -u)" = 0 ] || fail "--offline needs root, for debootstrap" "run it with sudo"
    command -v debootstrap >/dev/null || fail "debootstrap is not installed" "apt install debootstrap"
    WORK="$(mktemp -d "${TMPDIR:-/var/tmp}/aglite-image.XXXXXX")"
    trap 'rm -rf "$WORK"' EXIT
fi
for name in "${NAMES[@]}"; do
    describe "$name"
    "$MODE" "$name"
done
