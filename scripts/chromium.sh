#!/usr/bin/env bash
# Looks for the chromium that the browser tests need. Outside CI nothing is installed: without one these tests are
# skipped. In CI (CI=true) they must run: Debian's chromium is installed, and the script fails if that is not possible.
set -uo pipefail

for name in chromium chromium-browser google-chrome; do
    command -v "$name" > /dev/null && exit 0
done

if [ "${CI:-}" != true ]; then
    echo "chromium.sh: no chromium: the browser tests will be skipped (to run them: apt-get install chromium)"
    exit 0
fi

fail() {
    echo "chromium.sh: no chromium ($1), and in CI the browser tests must run" >&2
    exit 1
}

command -v apt-get > /dev/null || fail "none on PATH, and no apt-get to install it with"
[ "$(id -u)" = 0 ] || fail "none on PATH, and installing it takes root"

echo "chromium.sh: installing Debian's chromium for the browser tests"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install --yes --no-install-recommends chromium; } > "$log" 2>&1 < /dev/null || {
    tail -n 5 "$log" >&2
    fail "apt-get could not install it"
}
command -v chromium > /dev/null || fail "apt-get's package brought no command named chromium"
