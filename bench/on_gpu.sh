#!/usr/bin/env bash
# Tests and measures the kernels on a machine that has a GPU and may have no network.
#
#   bench/on_gpu.sh stage              on a machine with a network: fetches headers and libraries of
#                                      Debian 12 into .lockstep/stage/ and peers into .lockstep/peers/
#                                      (bench/peers/stage.sh)
#   bench/on_gpu.sh run RESULTS        on the GPU machine: builds all shapes, runs the tests and the four
#                                      sanitizers, and times the kernels beside the peers; files go to
#                                      the folder RESULTS
#   bench/on_gpu.sh measure RESULTS    as run, without the sanitizers, which take the longest
#   bench/on_gpu.sh check RESULTS      the first half of measure: builds and tests
#   bench/on_gpu.sh time RESULTS       the second half of measure: times the kernels beside the peers
#   bench/on_gpu.sh sanitize RESULTS   the sanitizers alone
#
# Names of operations may follow RESULTS: then only these are tested, sanitized and timed. On a
# machine that limits the time of a command, `check` and `time` into one folder and several
# `sanitize`, each into a folder of its own with some of the operations, give the same evidence as
# `run`: `reports/evidence.py merge` joins the folders.
#
# Afterwards `reports/evidence.py merge RESULTS` writes reports/kernels/. It takes only kernels
# whose sources still have the digests that RESULTS recorded. The GPU machine has CUDA 13.0, CMake,
# ninja and PyTorch 2.11; LOCKSTEP_COMMIT names the commit of a copy without git. LOCKSTEP_BUILT
# names a folder with lockstep_tests_gpu and liblockstep_torch.so that another machine has built
# from these sources, with all shapes that the run needs; then this script builds nothing.
#
# The sanitizers run the GPU tests except those of the largest batches and pools and of a prefix of
# 8,190 tokens (racecheck had not ended it after 340 s), and no random cases beyond the tests. Each
# tool runs in LOCKSTEP_SANITIZER_PARTS processes (4) of at most LOCKSTEP_SANITIZER_S seconds (400),
# and waits after every fifth launch: racecheck keeps the records of launches that nobody waits for.
for word in "$@"; do  # a word that asks for help starts nothing
  [[ $word != -* ]] || { sed -n '2,/^for /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
done
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
stage=$root/.lockstep/stage
built=${LOCKSTEP_BUILT:-$root/build/gpu}
packages='libexpected-dev libfmt-dev libfmt9 nlohmann-json3-dev libcli11-dev libzstd-dev libzstd1 libeigen3-dev
  libssl-dev libxxhash-dev libkainjow-mustache-dev libgtest-dev libgmock-dev librapidcheck-dev'

stage() {
  mkdir -p "$stage/debs"
  # shellcheck disable=SC2086  # each word is a package
  (cd "$stage/debs" && apt-get download $packages)
  for package in "$stage"/debs/*.deb; do dpkg -x "$package" "$stage/prefix"; done
  rm -rf "$stage/debs" "$stage/prefix/usr/share/doc" "$stage/prefix/usr/src"
  "$root/bench/peers/stage.sh"
}

build() {
  [ -z "${LOCKSTEP_BUILT:-}" ] || return 0
  local torch
  torch=$(python3 -c 'import os, torch; print(os.path.dirname(torch.__file__))')
  cmake -S "$root" -B "$built" -G Ninja -D CMAKE_BUILD_TYPE=Release -D LOCKSTEP_CUDA=on \
    -D LOCKSTEP_ALL_SHAPES=on -D LOCKSTEP_BUILD_TESTS=on -D LOCKSTEP_BUILD_BENCH=off \
    -D CMAKE_PREFIX_PATH="$stage/prefix/usr" -D LOCKSTEP_TORCH_DIR="$torch" -D LOCKSTEP_WERROR=off
  cmake --build "$built" --target lockstep_tests_gpu lockstep_torch_ops
}

refuse() {  # where a library has a libstdc++ beside PyTorch's, a refusal that prints sizes ends the process
  python3 - "$built/liblockstep_torch.so" <<'END'
import sys
import torch

torch.ops.load_library(sys.argv[1])
try:
    torch.ops.lockstep.state_copy(torch.zeros(1, 4, 8), *(torch.zeros(n, dtype=torch.int32) for n in (2, 3)))
except RuntimeError as error:
    sys.exit(0 if "[2]; got [3]" in str(error) else f"refused with: {error}")
sys.exit("three slots were copied from two")
END
}

tests_of() {  # the filter of the tests of OPERATION…: the suites of its file, and those of templates under its name
  local operation name suite filter=
  for operation in "$@"; do
    name=$(sed -E 's/(^|_)(.)/\U\2/g' <<<"$operation")
    filter+="$name/*:"
    for suite in $(find "$root/properties" -name "${operation}_gpu_test.cpp" -exec \
        sed -nE 's/^(TYPED_)?TEST(_[FP])?\(([A-Za-z0-9]+),.*/\3/p' {} + | sort -u); do
      filter+="$suite.*:$suite/*:"
    done
  done
  printf '%s' "${filter:-*}"
}

of_large_clusters() {  # barriers in blocks 8 to 15 of a cluster that synccheck calls missing (bench/synccheck_cluster.cu)
  grep -A3 'Barrier error detected. Missing init' "$1" | grep -c 'located at shared address 0x[89a-f][0-9a-f]\{6\}$' || true
}

sanitize() {  # sanitize RESULTS OPERATION…: writes each tool's number of errors, -1 for a tool that did not end
  local tool part errors separator=
  local tools='memcheck racecheck initcheck synccheck' parts=${LOCKSTEP_SANITIZER_PARTS:-4}
  local filter
  filter="$(tests_of "${@:2}")-*GoBeyond32Bits*:*SizeIsServedByItsKernel*:*DoNotDependOnTheRule*"
  for tool in $tools; do
    for ((part = 0; part < parts; ++part)); do
      GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$part timeout "${LOCKSTEP_SANITIZER_S:-400}" \
        compute-sanitizer --tool "$tool" --force-synchronization-limit 5 --error-exitcode 9 \
        "$built/lockstep_tests_gpu" --gtest_filter="$filter" >"$1/$tool.$part.log" 2>&1 &
    done
  done
  wait
  [ -e "$1/measured.json" ] || python3 "$root/reports/evidence.py" measured >"$1/measured.json"
  printf '{' >"$1/sanitizer.json"
  for tool in $tools; do
    cat "$1/$tool".?.log >"$1/$tool.log"
    rm "$1/$tool".?.log
    errors=$(sed -n 's/.*ERROR SUMMARY: \([0-9]*\) error.*/\1/p; s/.*RACECHECK SUMMARY: \([0-9]*\) hazard.*/\1/p
      s/.*process didn.t terminate successfully.*/died/p' "$1/$tool.log" |
      awk -v parts=$parts '{sum += $1} END {print NR == parts ? sum : -1}')
    [ "$tool" != synccheck ] || [ "$errors" = -1 ] || errors=$((errors - $(of_large_clusters "$1/$tool.log")))
    printf '%s"%s": %s' "$separator" "$tool" "$errors" >>"$1/sanitizer.json"
    separator=', '
  done
  [ $# = 1 ] || printf ', "operations": [%s]' "$(printf ', "%s"' "${@:2}" | cut -c3-)" >>"$1/sanitizer.json"
  printf '}\n' >>"$1/sanitizer.json"
}

test_all() {  # test_all RESULTS OPERATION…: runs the GPU tests in 8 processes; CPU references take most of the time
  local part parts=8 pids=() failed=0
  for ((part = 0; part < parts; ++part)); do
    GTEST_TOTAL_SHARDS=$parts GTEST_SHARD_INDEX=$part LOCKSTEP_ACCURACY=$1/accuracy.$part.json \
      "$built/lockstep_tests_gpu" --gtest_filter="$(tests_of "${@:2}")" >"$1/tests.$part.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  cat "$1"/tests.?.log >"$1/tests.log"
  python3 "$root/reports/evidence.py" join "$1/accuracy.json" "$1"/accuracy.?.json
  rm "$1"/tests.?.log "$1"/accuracy.?.json
  grep -h 'PASSED\|FAILED TEST' "$1/tests.log"
  return $failed
}

correct() {  # correct RESULTS OPERATION…: the tests, the operators under Python and FlashMLA's grid, side by side
  local results=$1 operations=("${@:2}") pids=() failed=0 name
  test_all "$@" &
  pids+=($!)
  for name in "${operations[@]:-all}"; do
    python3 "$root/properties/kernels/torch/torch_ops_check.py" "$built/liblockstep_torch.so" --device cuda \
      ${operations[@]:+--operation "$name"} >"$results/operators.$name.log" 2>&1 &
    pids+=($!)
  done
  if [[ " ${operations[*]:-mla_decode} " = *" mla_decode "* ]]; then
    python3 "$root/properties/kernels/torch/flashmla_grid_check.py" "$built/liblockstep_torch.so" --device cuda \
      >"$results/flashmla_grid.log" 2>&1 &
    pids+=($!)
  fi
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  cat "$results"/operators.*.log >"$results/operators.log"
  rm "$results"/operators.*.log
  [ $failed = 0 ] || { grep -A12 Failure "$results/tests.log" | head -60; tail -n 20 "$results/operators.log"; }
  tail -n 1 "$results/flashmla_grid.log" 2>/dev/null || true
  return $failed
}

measure() {  # measure RESULTS WHAT OPERATION…: WHAT is check, time or both
  local results=$1 what=$2 operations=("${@:3}") compiling=
  python3 "$root/reports/evidence.py" measured >"$results/measured.json"
  build >"$results/build.log" 2>&1 || { tail -40 "$results/build.log"; exit 1; }
  refuse || { echo "on_gpu: $built/liblockstep_torch.so cannot refuse arguments here: was it linked with another libstdc++?"; exit 1; }
  if [ "$what" != check ]; then
    python3 "$root/bench/peers/compile_triton.py" ${operations[@]/#/--operation } >"$results/compile.log" 2>&1 &
    compiling=$!
  fi
  [ "$what" = time ] || correct "$results" "${operations[@]}" || exit 1
  [ "$what" != check ] || return 0
  wait $compiling || tail -3 "$results/compile.log"  # run.py compiles whatever is missing when it tunes
  python3 "$root/bench/peers/run.py" --ours "$built/liblockstep_torch.so" --out "$results" \
    ${operations[@]/#/--operation }
}

case ${1:-} in
  stage) stage ;;
  run | measure | check | time | sanitize)
    results=$(mkdir -p -- "${2:?RESULTS}" && cd -- "$2" && pwd)
    case $1 in
      run | measure) measure "$results" both "${@:3}" ;;
      check | time) measure "$results" "$1" "${@:3}" ;;
    esac
    case $1 in
      run | sanitize) sanitize "$results" "${@:3}"; cat "$results/sanitizer.json" ;;
    esac
    ;;
  *) sed -n '2,23p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
