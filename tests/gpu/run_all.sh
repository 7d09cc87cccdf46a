#!/usr/bin/env bash
# Runs the programs that need a GPU, one after another: tests/gpu/run_all.sh PART... (no part: all that one GPU is enough for).
# Each writes its JSON as it goes, so a run that is cut short keeps what it has; the files are copied to $OUT when that is set.
# Parts: tiles memory push_pull layout_capture, colocated (or colocated-dense -moe -pause -trace), correctness lifecycle native;
# on two GPUs dense_7b moe_30b.
# TINY=1 runs all of it on CPUs with toy shapes. PYTHON names the interpreter; SECONDS_EACH bounds each program.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-python3}
RESULTS=docs/benchmarks
[ -z "${TINY:-}" ] || RESULTS=build/benchmarks
export PYTHONUNBUFFERED=1 PYTHONPATH=client:operator:worker_image:.${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$RESULTS"
failed=()

# vLLM finds our plugin by the distribution's metadata, which a checkout that nobody has installed lacks.
if ! compgen -G 'worker_image/*.egg-info/entry_points.txt' >/dev/null; then
  for folder in client worker_image; do
    (cd $folder && "$PYTHON" -c 'from setuptools import setup; setup()' -q egg_info) || exit
  done
fi

run() {    # NAME PROGRAM...
  local name=$1
  shift
  printf '\n== %s (%d s since the beginning)\n' "$name" "$SECONDS"
  # An interrupt, unlike a termination, lets a program end its engines: one left behind halves what the next part measures.
  timeout --signal=INT --kill-after=45 "${SECONDS_EACH:-500}" "$PYTHON" "$@" || failed+=("$name ($?)")
  [ -z "${OUT:-}" ] || cp "$RESULTS"/*.json "$OUT"/ 2>/dev/null
}

parts=("$@")
[ $# -gt 0 ] || parts=(tiles memory push_pull layout_capture colocated correctness lifecycle)
for part in "${parts[@]}"; do
  case $part in
    tiles | memory | push_pull | layout_capture) run "$part" -m benchmarks.keep_lines "$part" "tests/gpu/$part.py" ;;
    colocated) run colocated -m benchmarks.refit_colocated ;;
    # These four make one file together, in any order and over several calls; delete it to begin anew.
    colocated-dense) run "$part" -m benchmarks.refit_colocated --add --shapes dense --parts rivals,ours,trace ;;
    colocated-moe) run "$part" -m benchmarks.refit_colocated --add --shapes moe --parts rivals,ours ;;
    colocated-pause) run "$part" -m benchmarks.refit_colocated --add --shapes dense --parts pause ;;
    colocated-trace) run "$part" -m benchmarks.refit_colocated --add --shapes dense --parts trace ;;
    correctness) run correctness tests/gpu/correctness.py ;;
    lifecycle) run lifecycle tests/gpu/lifecycle.py ;;
    native) run native tests/gpu/native_refit.py ;;
    dense_7b | moe_30b) run "$part" -m "benchmarks.refit_$part" ;;
    *) echo "run_all.sh: no part $part" >&2; exit 2 ;;
  esac
done
printf '\n== done after %d s; failed: %s\n' "$SECONDS" "${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
