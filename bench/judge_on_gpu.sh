#!/usr/bin/env bash
# Judges kernels with `lockstep judge` on a GPU machine: FLA's, ours, and calls of ours that are
# wrong on purpose.
#
#   bench/judge_on_gpu.sh RESULTS [OPERATION…]    writes the verdicts into the folder RESULTS as JSON
#                                                 and text; without operations it judges all
#
# Run `bench/on_gpu.sh run` first: it builds build/gpu. Or LOCKSTEP_BUILT names a folder with
# lockstep, lockstep-judge and liblockstep_torch.so, as in on_gpu.sh. The exit status is 0 if our kernels pass
# everything and every broken call and every cheat is caught; FLA's verdict does not count. Where
# FLA is neither installed nor staged (bench/on_gpu.sh stage), its verdict names it as absent.
# Broken calls run side by side; a judgement with timing runs alone.
for word in "$@"; do  # a word that asks for help starts nothing
  [[ $word != -* ]] || { sed -n '2,/^for /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
done
set -uo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
results=$(mkdir -p -- "${1:?RESULTS}" && cd -- "$1" && pwd) || exit 2
cd -- "$root" || exit 2
shift
operations=" $* "
build=${LOCKSTEP_BUILT:-$root/build/gpu}
export PYTHONPATH=$root/.lockstep/peers${PYTHONPATH:+:$PYTHONPATH} LOCKSTEP_TORCH_LIBRARY=$build/liblockstep_torch.so
if [[ -z ${LOCKSTEP_BUILT:-} ]]; then
  cmake --build "$build" --target lockstep-judge >"$results/build.log" 2>&1 || { tail -20 "$results/build.log"; exit 3; }
fi
candidates=fixtures/candidates
ours=$candidates/lockstep_ops.py
failed=0
beside=()

asked() { [[ -z ${operations// /} || $operations == *" $1 "* ]]; }

verdict() {  # verdict NAME WANTED OPERATION CANDIDATE [WORD…]: WANTED is a list of exit statuses, or `any`
  local name=$1 wanted=$2 operation=$3 candidate=$4 status
  shift 4
  "$build/lockstep" judge "$operation" --candidate "$candidate" --device cuda --timeout 280 \
    --json "$results/$name.json" "$@" >"$results/$name.txt" 2>&1
  status=$?
  printf '\n== %s: status %s (wanted: %s)\n%s\n' "$name" "$status" "$wanted" "$(tail -n 12 "$results/$name.txt")"
  [[ $wanted == any || " $wanted " == *" $status "* ]]
}
judge() {  # judge NAME WANTED OPERATION CANDIDATE [WORD…]: as verdict, if the command line selects the operation
  asked "$3" || return 0
  verdict "$@" || failed=1
}
broken() {  # broken OPERATION FUNCTION [WORD…]: judges in the background a call of ours that must be caught
  asked "$1" || return 0
  verdict "broken_$2" "10 11" "$1" "$ours:$2" --no-time "${@:3}" &
  beside+=($!)
}

judge fla any gated_delta_rule_update $candidates/fla.py:gated_delta_rule_update
for cheat in skips_when_timed caches_by_address patches_clock forges_status; do
  judge "cheat_$cheat" "10 11" gated_delta_rule_update $candidates/torch_cheats.py:$cheat --batch 4 --case serving-in-order
done
if asked state_scatter_accepted; then
  nvcc=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v nvcc)
  if [[ -n $nvcc ]] && "$nvcc" -O3 -arch=native -shared -Xcompiler -fPIC -I kernels/judge $candidates/scatter.cu \
      -o "$results/scatter.so" >"$results/nvcc.log" 2>&1; then
    judge library 0 state_scatter_accepted "$results/scatter.so:scatter"
    judge broken_library 11 state_scatter_accepted "$results/scatter.so:scatter_by_index" --batch 4 --no-time
    rm -f "$results/scatter.so"
  else
    printf '\nthe shared library was not built\n'
    failed=1
  fi
fi
for types in bfloat16/float32 bfloat16/bfloat16; do
  judge "gdn_${types//\//_}" 0 gated_delta_rule_update $ours:gated_delta_rule_update --types $types
done
judge ssu 0 selective_state_update $ours:selective_state_update
judge mamba1 0 mamba1_decode $ours:mamba1_decode
judge mamba1_prefill 0 mamba1_prefill $ours:mamba1_prefill
judge mixer 0 mamba2_mixer_decode $ours:mamba2_mixer_decode
judge net 0 gated_delta_net_decode $ours:gated_delta_net_decode
judge ssu_ring 0 selective_state_ring_update $ours:selective_state_ring_update
judge gdn_ring 0 gated_delta_rule_ring_update $ours:gated_delta_rule_ring_update
judge ssd 0 ssd_prefill $ours:ssd_prefill
judge gdn_prefill 0 gated_delta_rule_prefill $ours:gated_delta_rule_prefill
judge mla 0 mla_decode $ours:mla_decode
judge mla_e4m3 0 mla_decode_e4m3 $ours:mla_decode_e4m3
judge mla_prefill 0 mla_prefill $ours:mla_prefill
judge merge 0 merge_attention $ours:merge_attention
judge product 0 batched_product $ours:batched_product
judge conv 0 causal_conv1d_update $ours:causal_conv1d_update
judge conv_prefill 0 causal_conv1d $ours:causal_conv1d
judge copy 0 state_copy $ours:state_copy
judge scatter 0 state_scatter_accepted $ours:state_scatter_accepted

for mistake in raw_beta group_modulo no_scale; do broken gated_delta_rule_update $mistake --batch 4; done
for operation in selective_state_ring_update gated_delta_rule_ring_update; do
  broken $operation ${operation}_without_ring
done
for operation in ssd_prefill mamba1_prefill gated_delta_rule_prefill; do broken $operation ${operation}_from_zero; done
for mistake in scale_of_width no_pe whole_last_page mean_of_pieces piece_too_many empty_minus; do
  broken mla_decode mla_decode_$mistake
done
for mistake in no_pe piece_too_many empty_plus; do broken mla_prefill mla_prefill_$mistake; done
for one in "${beside[@]}"; do wait "$one" || failed=1; done
printf '\n%s\n' "$([[ $failed == 0 ]] && echo 'ours pass, broken copies and cheats are caught' || echo 'NOT AS WANTED: see above')"
exit $failed
