#!/usr/bin/env bash
# Does what a newcomer would: clones this commit into an empty folder and runs `make demo` and `make test` there, with
# a new environment, no folder beside it and nothing cached from any hub. Fails if either does.
set -euo pipefail
cd "$(dirname "$0")/.."

commit=$(git rev-parse --verify HEAD)
if [ -n "$(git status --porcelain)" ]; then
    echo "fresh.sh: note: what is not committed is not part of this run"
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
git clone --quiet --no-hardlinks . "$scratch/clearhead"
cd "$scratch/clearhead"
git -c advice.detachedHead=false checkout --quiet "$commit"

# What this shell or a calling make has set must not leak in.
unset MAKEFLAGS MFLAGS MAKELEVEL MAKEOVERRIDES VIRTUAL_ENV PYTHONPATH PYTHONHOME
export HF_HOME="$scratch/hub"

step() {
    echo "fresh.sh: $* (commit ${commit:0:12})"
    "$@" || { echo "fresh.sh: '$*' failed in a fresh clone" >&2; exit 1; }
}
step make demo
test -s demo.html || { echo "fresh.sh: make demo left no demo.html" >&2; exit 1; }
step make test
if [ -n "$(git status --porcelain)" ]; then
    git status --short
    echo "fresh.sh: the run left files that git does not ignore" >&2
    exit 1
fi
echo "fresh.sh: a newcomer's two commands work"
