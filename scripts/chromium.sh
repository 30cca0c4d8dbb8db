#!/usr/bin/env bash
# Sees to it that the browser tests find a chromium: installs Debian's where that is allowed, else says why not.
# Fails only in CI (CI=true), where the browser tests must not be skipped.
set -uo pipefail

for name in chromium chromium-browser google-chrome; do
    command -v "$name" > /dev/null && exit 0
done

give_up() {
    if [ "${CI:-}" = true ]; then
        echo "chromium.sh: no chromium ($1), and in CI the browser tests must run" >&2
        exit 1
    fi
    echo "chromium.sh: no chromium ($1): the browser tests will be skipped"
    exit 0
}

command -v apt-get > /dev/null || give_up "none on PATH, and no apt-get to install it with"
[ "$(id -u)" = 0 ] || give_up "none on PATH, and installing it takes root: apt-get install chromium"

echo "chromium.sh: installing Debian's chromium for the browser tests"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install --yes --no-install-recommends chromium; } > "$log" 2>&1 < /dev/null || {
    tail -n 5 "$log" >&2
    give_up "apt-get could not install it"
}
command -v chromium > /dev/null || give_up "apt-get's package brought no command named chromium"
