# Sourced by run and long: a copy of the checkout and a fresh venv, both gone at the end, so that
# the tree stays clean and nothing that lies on this machine helps. Needs Python 3.10+ and pip.
set -euo pipefail
exec </dev/null
export CI="${CI:-true}" PIP_DISABLE_PIP_VERSION_CHECK=1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Tests count system calls with strace; without it they are skipped.
if ! command -v strace >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get -q update && apt-get -q install -y strace; } >/dev/null 2>&1 || echo "no strace: its tests are skipped"
fi

mkdir "$work/main"
skip=(.git .venv venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis)
tar -C "$root" "${skip[@]/#/--exclude=./}" --exclude=__pycache__ --exclude='*.egg-info' \
  --exclude='./benchmarks/tmp-*' -cf - . | tar -C "$work/main" -xf -
if [ -d "$root/../shared" ]; then ln -s "$(cd "$root/../shared" && pwd)" "$work/shared"; fi

"${PYTHON:-python3}" -m venv "$work/venv"
. "$work/venv/bin/activate"
cd "$work/main"

# The ```bash block of README.md that stands under <!-- ci: NAME -->.
readme_block() {
  awk -v mark="<!-- ci: $1 -->" '
    $0 == mark { wanted = 1; next }
    wanted && /^```bash/ { inside = 1; next }
    inside && /^```/ { exit }
    inside { print }' README.md
}

# Run such a block as a reader would, and stop at the first line that fails.
run_readme_block() {
  local block
  block=$(readme_block "$1")
  [ -n "$block" ] || { echo "README.md has no block <!-- ci: $1 -->"; exit 1; }
  echo "== README: $1"
  bash -euo pipefail -x -c "$block" 2>&1
}
