#!/usr/bin/env bash
# Plays random traces with tensors in the slots of caches, run by the kernels on a GPU.
#
#   bench/numbers_on_gpu.sh RESULTS    writes the tests' and the searches' outputs into the folder
#                                      RESULTS, and summary.txt
#
# Sound policies must show nothing, planted mistakes of policies and a layer whose rows depend on
# the batch must be found. LOCKSTEP_BUILT (default: build/current) names a folder with
# lockstep, lockstep-torch, lockstep_numbers_torch_tests and liblockstep_torch.so, compiled for this
# GPU. python3 has PyTorch 2.11. LOCKSTEP_SECONDS (20) limits each search; all of it takes six
# minutes. The exit status is 0 where everything is as it must be.
for word in "$@"; do  # a word that asks for help starts nothing
  [[ $word != -* ]] || { sed -n '2,/^# minutes/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
done
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
results=$(mkdir -p -- "${1:?RESULTS}" && cd -- "$1" && pwd) || exit 2
built=${LOCKSTEP_BUILT:-$root/build/current}
seconds=${LOCKSTEP_SECONDS:-20}
libraries=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))') || exit 3
export LD_LIBRARY_PATH=$built:$libraries:${LD_LIBRARY_PATH:-}
cd -- "$root" || exit 2
failed=0
: >"$results/summary.txt"
said() { printf '%4d s  %s\n' "$SECONDS" "$*" | tee -a "$results/summary.txt"; }

"$built/lockstep_numbers_torch_tests" --gtest_filter='*OnAGpu*' >"$results/tests.log" 2>&1
status=$?
said "tests on the GPU: status $status, $(grep -c '^\[       OK' "$results/tests.log") passed, $(grep -c '^\[  SKIPPED' "$results/tests.log") skipped"
[[ $status == 0 ]] && ! grep -q '^\[  SKIPPED' "$results/tests.log" || failed=1

search() {  # search NAME WANTED WORD…: WANTED is `nothing` or `found`
  local name=$1 wanted=$2 status
  shift 2
  "$built/lockstep-torch" explore "$@" --time "${seconds}s" --seed 1 --out "$results/$name" >"$results/$name.log" 2>&1
  status=$?
  said "$name: status $status, $(tail -n 1 "$results/$name.log")"
  case $wanted:$status in nothing:0 | found:10 | found:11) ;; *) failed=1 ;; esac
}
for policy in sglang-no-buffer sglang-extra-buffer marconi; do
  for model in tiny-nemotron-h tiny-qwen3-next; do
    search "$policy.$model" nothing --subject $policy --fidelity kernels --config model=$model
  done
done
search radix.tiny-window nothing --subject radix --fidelity kernels --config model=tiny-window
search radix.tiny-qwen3 nothing --subject radix --fidelity kernels --config model=tiny-qwen3
for defect in sglang-no-buffer:drops-initial-state sglang-no-buffer:split-moves-state \
    sglang-no-buffer:shares-live-slot sglang-extra-buffer:tracks-conv-at-the-end; do
  search "defect.${defect#*:}" found --defect $defect --fidelity kernels
done
said "$([[ $failed == 0 ]] && echo 'all as it must be' || echo 'NOT AS WANTED: see above')"
exit $failed
