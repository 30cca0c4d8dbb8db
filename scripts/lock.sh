#!/usr/bin/env bash
# Writes a lock file: the exact versions that pyproject.toml's core + vision + shap + flow + bench + web + code + dev resolve to in a fresh environment.
#
#   scripts/lock.sh requirements.lock
#   scripts/lock.sh requirements-oldest.lock transformers==5.0.0
#
# Everything after the file name is an extra requirement. torch goes in first and is pinned, so that no other package
# can pull in a newer build of it.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=${1:?usage: scripts/lock.sh FILE [REQUIREMENT …]}
shift
torch=torch==2.13.0

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip --disable-pip-version-check)

editables=(-e ".[vision,shap,flow,bench,web,code,dev]")
for project in packages/*/pyproject.toml; do
    [ -e "$project" ] && editables+=(-e "$(dirname "$project")")
done

"${pip[@]}" install -qq "$torch" hatchling editables
"${pip[@]}" install -qq --no-build-isolation "$torch" "$@" "${editables[@]}"
"${pip[@]}" check

# A local build label (+cpu) names a file that not every machine has; CUDA's packages belong to a machine, not to a lock.
{
    echo "# Made by \`make lock\` (scripts/lock.sh $lock${*:+ $*}) with $("$scratch/venv/bin/python" --version). Do not edit."
    "${pip[@]}" freeze --all --exclude-editable --exclude pip |
        sed -E 's/^([A-Za-z0-9._-]+==[^+ ]+)\+[A-Za-z0-9.]+$/\1/' |
        grep -v -i -E '^(nvidia-|cuda-)'
} > "$scratch/lock"
if grep -n -E ' @ |://' "$scratch/lock"; then
    echo "lock.sh: the lines above are addresses, not versions; $lock is left as it was" >&2
    exit 1
fi
cp "$scratch/lock" "$lock"
echo "$lock: $(grep -c == "$lock") packages"
