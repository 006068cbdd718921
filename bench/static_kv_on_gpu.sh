#!/usr/bin/env bash
# Checks and times Qwen3 exported with fixed shapes on a GPU: compares CUDA graphs in C++ and Python
# with the original model, runs compute-sanitizer, and times a decode step.
#
#   bench/static_kv_on_gpu.sh RESULTS [FOLDER]    writes logs and RESULTS/static_kv.json, the new content
#                                                 of reports/static_kv.json
#
# FOLDER (default: build/current) has lockstep_static_kv_gpu_tests, lockstep_static_kv_times and
# lockstep_graph_copy. python3 has PyTorch 2.11 and transformers 5.23. LOCKSTEP_COMMIT names the
# commit of a copy without git. Packages are made while the tests that need none run; times are
# taken last, when nothing else runs. All of it takes six minutes.
for word in "$@"; do  # a word that asks for help starts nothing
  [[ $word != -* ]] || { sed -n '2,/^for /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
done
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
results=$(mkdir -p -- "${1:?RESULTS}" && cd -- "$1" && pwd) || exit 2
built=${2:-$root/build/current}
packages=${LOCKSTEP_STATIC_KV:-/tmp/lockstep_static_kv}
static_kv=(python3 "$root/fixtures/subjects/static_kv")
libraries=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))')
export LD_LIBRARY_PATH=$libraries:${LD_LIBRARY_PATH:-} PYTHONUNBUFFERED=1
cd -- "$results" || exit 2

parts=()
part() {  # part LOG COMMAND…: runs COMMAND in the background, with its output in LOG
  local log=$1
  shift
  "$@" >"$log" 2>&1 &
  parts+=("$! $log")
}
finished() {
  local one
  for one in "${parts[@]}"; do wait "${one% *}"; echo "${one#* }: status $?"; done
  parts=()
}
graphs() { AOTI_RUNTIME_CHECK_INPUTS=0 "$built/lockstep_static_kv_gpu_tests" "$@"; }
sanitized() {  # sanitized PREFIX FILTER: starts each tool on the tests of FILTER, with its output in PREFIX<tool>.log
  local tool
  for tool in memcheck racecheck initcheck synccheck; do
    part "$1$tool.log" timeout "${LOCKSTEP_SANITIZER_S:-240}" compute-sanitizer --tool $tool --error-exitcode 9 \
      "$built/lockstep_static_kv_gpu_tests" --gtest_filter="$2"
  done
}

echo "== $SECONDS s: packages, what needs none of them, what torch.compile makes (kept, and found when times are taken)"
for shape in tied untied qwen3-0.6b; do
  part "packages.$shape.log" "${static_kv[@]}" packages "$packages" shape=$shape device=cuda
done
for shape in tied qwen3-0.6b; do
  part "compile.$shape.log" "${static_kv[@]}" cost "$packages" compile shape=$shape device=cuda
done
part graphs.log graphs --gtest_filter=-*Packages* --gtest_output=json:graphs.json
sanitized '' '*fewSteps*/tied'
for form in stream graph nothing; do  # shows whether initcheck follows copies inside a graph
  part "copy.$form.log" compute-sanitizer --tool initcheck --print-limit 1 "$built/lockstep_graph_copy" $form
done
part traps.log "${static_kv[@]}" check device=cuda
for shape in tied untied; do
  part "table.$shape.exported.log" "${static_kv[@]}" table "$packages" device=cuda shape=$shape form=exported
done
finished

echo "== $SECONDS s: packages against the original"
export LOCKSTEP_STATIC_KV=$packages
part packages.log graphs --gtest_filter=*Packages* --gtest_output=json:packages.json
sanitized packages. '*Packages.fewSteps*'
for shape in tied untied; do
  part "table.$shape.package.log" "${static_kv[@]}" table "$packages" device=cuda shape=$shape form=package
done
finished

echo "== $SECONDS s: times"
nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader >others.txt 2>/dev/null || rm -f others.txt
for shape in tied qwen3-0.6b; do
  part "cost.$shape.log" "${static_kv[@]}" cost "$packages/$shape" shape=$shape device=cuda json="cost.$shape.json"
  finished
done
"$built/lockstep_static_kv_times" "$packages/tied" 8 16 >times.tied.json 2>times.log
"$built/lockstep_static_kv_times" "$packages/qwen3-0.6b" 512 32 >times.qwen3-0.6b.json 2>>times.log
echo "== $SECONDS s: evidence"
python3 "$root/reports/static_kv.py" write "$results"
