#!/usr/bin/env bash
# Qwen3 exported with fixed shapes on a GPU: CUDA graphs in C++ and Python against the original, compute-sanitizer, and
# time per decode step.
#
#   bench/static_kv_on_gpu.sh RESULTS [FOLDER]    writes RESULTS/static_kv.json, which is reports/static_kv.json, and logs
#
# FOLDER has lockstep_static_kv_gpu_tests, lockstep_static_kv_times and lockstep_graph_copy, build/current unless it is
# named. python3 has PyTorch 2.11 and transformers 5.23. LOCKSTEP_COMMIT names the commit of a copy without git. Packages
# are made in parallel with the tests that need none; times are taken last, when nothing else runs.
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
results=$(mkdir -p -- "${1:?RESULTS}" && cd -- "$1" && pwd) || exit 2
built=${2:-$root/build/current}
packages=${LOCKSTEP_STATIC_KV:-/tmp/lockstep_static_kv}
static_kv=(python3 "$root/fixtures/subjects/static_kv")
libraries=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))')
export LD_LIBRARY_PATH=$libraries:${LD_LIBRARY_PATH:-} PYTHONUNBUFFERED=1
cd -- "$results" || exit 2

graphs() { "$built/lockstep_static_kv_gpu_tests" "$@"; }

made=() sanitizers=()
echo "== $SECONDS s: packages, tests without packages, sanitizers"
for shape in tied untied qwen3-0.6b; do
  "${static_kv[@]}" packages "$packages" shape=$shape device=cuda >"packages.$shape.log" 2>&1 &
  made+=($!)
done
graphs --gtest_filter=-*Packages* --gtest_output=json:graphs.json >graphs.log 2>&1 &
tests=$!
for tool in memcheck racecheck initcheck synccheck; do
  timeout "${LOCKSTEP_SANITIZER_S:-240}" compute-sanitizer --tool $tool --error-exitcode 9 \
    "$built/lockstep_static_kv_gpu_tests" --gtest_filter='*fewSteps*/tied' >"$tool.log" 2>&1 &
  sanitizers+=($!)
done
for form in stream graph nothing; do  # what initcheck says of copies inside a graph
  timeout 60 compute-sanitizer --tool initcheck --print-limit 1 "$built/lockstep_graph_copy" $form >"copy.$form.log" 2>&1
done
wait $tests; echo "graphs: status $?"
for pid in "${made[@]}"; do wait "$pid"; echo "packages: status $?"; done

echo "== $SECONDS s: packages against the original"
export LOCKSTEP_STATIC_KV=$packages
AOTI_RUNTIME_CHECK_INPUTS=0 graphs --gtest_filter=*Packages* --gtest_output=json:packages.json >packages.log 2>&1 &
parts=($!)
"${static_kv[@]}" check device=cuda >traps.log 2>&1 &
parts+=($!)
for shape in tied untied; do
  for form in exported package; do
    "${static_kv[@]}" table "$packages" device=cuda shape=$shape form=$form >"table.$shape.$form.log" 2>&1 &
    parts+=($!)
  done
done
for shape in tied qwen3-0.6b; do  # what torch.compile makes is kept, and found again when times are taken
  "${static_kv[@]}" cost "$packages/$shape" shape=$shape device=cuda >"warm.$shape.log" 2>&1 &
  parts+=($!)
done
for tool in memcheck racecheck initcheck synccheck; do
  AOTI_RUNTIME_CHECK_INPUTS=0 timeout "${LOCKSTEP_SANITIZER_S:-240}" compute-sanitizer --tool $tool --error-exitcode 9 \
    "$built/lockstep_static_kv_gpu_tests" --gtest_filter='*Packages.fewSteps*' >"packages.$tool.log" 2>&1 &
  sanitizers+=($!)
done
for pid in "${parts[@]}"; do wait "$pid"; echo "part: status $?"; done
for pid in "${sanitizers[@]}"; do wait "$pid"; echo "sanitizer: status $?"; done

echo "== $SECONDS s: times"
nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader >others.txt 2>/dev/null || rm -f others.txt
for shape in tied qwen3-0.6b; do
  "${static_kv[@]}" cost "$packages/$shape" shape=$shape device=cuda json="cost.$shape.json" >"cost.$shape.log" 2>&1
  echo "cost $shape: status $?"
done
"$built/lockstep_static_kv_times" "$packages/tied" 8 16 >times.tied.json 2>times.log
"$built/lockstep_static_kv_times" "$packages/qwen3-0.6b" 512 32 >times.qwen3-0.6b.json 2>>times.log
echo "== $SECONDS s: evidence"
python3 "$root/reports/static_kv.py" write "$results"
