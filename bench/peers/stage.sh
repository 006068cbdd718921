#!/usr/bin/env bash
# Fetches the peers' kernels by name and unpacks the few files that the benchmark loads.
#
#   bench/peers/stage.sh [FOLDER]        default: .lockstep/peers, which git ignores
#
# It runs on a machine with a network; the folder is then copied to the machine with the GPU. All
# peers come as wheels from the package index, except mamba-ssm, whose source distribution builds
# CUDA: its files come from its repository (MAMBA_REPOSITORY names another place to clone
# from). WHEELS names a folder that already has some of the wheels.
#
# Three kinds of kernels are compiled, and all are kept in flashinfer_kernels/, flashqla_kernels/ and
# mamba_kernels/:
# - here, by nvcc and compile_kernels.py: FlashInfer's kernels for MLA, its cache and ragged
#   prompts, its checkpointing_ssu, FlashInfer's decodes of the gated delta rule, FlashInfer's and
#   FlashQLA's prefills of it, and mamba-ssm's scan of Mamba1;
# - on the GPU machine, by its nvcc: FlashInfer's CUDA kernels for selective_state_update, and DeepGEMM's
#   products, which are not kept;
# - on the GPU machine, by the CuTe compiler, which DSL=1 packs (60 MB): decodes of the gated delta
#   rule that were not compiled here.
for word in "$@"; do  # a word that asks for help starts nothing
  [[ $word != -* ]] || { sed -n '2,/^for /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
done
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
out=${1:-$root/.lockstep/peers}
wheels=${WHEELS:-$out/../peers_wheels}
mkdir -p "$out" "$wheels"
out=$(cd "$out" && pwd)
wheels=$(cd "$wheels" && pwd)
python=${PYTHON_VERSION:-3.12}  # of the machine with the GPU

# fetch NAME VERSION: downloads the wheel unless $wheels has it, and prints its path.
fetch() {
  local stem=${1//-/_}
  if ! ls "$wheels/$stem-$2-"*.whl >/dev/null 2>&1; then
    local platforms=()
    local p
    for p in _2_35 _2_34 _2_31 _2_28 _2_24 _2_17 2014; do
      platforms+=(--platform "manylinux${p}_x86_64")
    done
    pip download -q --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
      "${platforms[@]}" -d "$wheels" "$1==$2" >&2
  fi
  ls "$wheels/$stem-$2-"*.whl | head -1
}

cd "$out"
rm -rf fla vllm sglang mamba_ssm einops flashinfer tvm_ffi flash_qla tilelang_runtime

wheel=$(fetch fla-core 0.6.0)
unzip -qo "$wheel" 'fla/__init__.py' 'fla/utils/*' 'fla/ops/utils/*.py' \
  'fla/ops/gated_delta_rule/*.py' 'fla/backends.py' 'fla/modules/norm/l2norm.py' \
  'fla/ops/common/*.py' 'fla/ops/cp/*.py'
echo 0.6.0 >fla/VERSION

wheel=$(fetch vllm 0.33.0)
unzip -qo "$wheel" 'vllm/model_executor/layers/mamba/ops/*.py' \
  'vllm/model_executor/layers/mamba/ops/configs/selective_state_update/*H[12]00*' \
  'vllm/third_party/flash_linear_attention/ops/*.py' 'vllm/model_executor/determinism/batch_invariant*.py'
echo 0.33.0 >vllm/VERSION
mkdir -p vllm_libraries
unzip -qoj "$wheel" vllm/_flashmla_C.abi3.so vllm/_flashmla_extension_C.abi3.so -d vllm_libraries
if [ ! -e deep_gemm.tar.xz ]; then  # 6 MB instead of 57: it compiles its headers at run time
  unpacked=$(mktemp -d)
  unzip -qo "$wheel" 'vllm/third_party/deep_gemm/*' -d "$unpacked"
  tar -C "$unpacked/vllm/third_party" -cJf deep_gemm.tar.xz deep_gemm
  rm -r "$unpacked"
fi
if [ ! -e vllm_libraries/_vllm_fa3_C.abi3.so.xz ]; then  # the compression takes a minute
  unzip -p "$wheel" vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so | xz -3 >vllm_libraries/_vllm_fa3_C.abi3.so.xz
fi
if [ ! -e vllm_libraries/_C_stable_libtorch.abi3.so.xz ]; then
  unzip -p "$wheel" vllm/_C_stable_libtorch.abi3.so | "$root/bench/peers/for_hopper.py" |
    xz -3 >vllm_libraries/_C_stable_libtorch.abi3.so.xz
fi
echo 0.33.0 >vllm_libraries/VERSION

wheel=$(python=3.11 fetch sglang 0.5.23)  # its wheels are for one version of Python each
unzip -qo "$wheel" 'sglang/kernels/ops/attention/linear/fused_recurrent_linear_replayssm.py'
echo 0.5.23 >sglang/VERSION

wheel=$(fetch flashinfer-python 0.7.2.post1)
unzip -qo "$wheel" 'flashinfer/gdn_decode.py' 'flashinfer/gdn_kernels/__init__.py' \
  'flashinfer/gdn_kernels/gdn_decode_'{bf16_state,mtp,pretranspose}.py \
  'flashinfer/gdn_kernels/'{cute_dsl_cache_naming,device_target,dtype_compat,qk_l2norm}.py \
  flashinfer/gdn_prefill.py 'flashinfer/gdn_kernels/delta_rule_dsl/'{alpha,helpers,schedule,varlen_helper}.py \
  'flashinfer/gdn_kernels/delta_rule_dsl/'{collective_inverse_hmma,collective_store_tma}.py \
  'flashinfer/gdn_kernels/delta_rule_dsl/delta_rule_'{sm90,cp_sm90}.py \
  'flashinfer/data/csrc/selective_state_update*' 'flashinfer/data/csrc/*mamba_binding.cu' \
  'flashinfer/data/csrc/tvm_ffi_utils.h' 'flashinfer/data/include/flashinfer/exception.h' \
  'flashinfer/data/include/flashinfer/'{utils,vec_dtypes,layout}.cuh \
  'flashinfer/data/include/flashinfer/mamba/*.cuh'
echo 0.7.2.post1 >flashinfer/VERSION
wheel=$(fetch apache-tvm-ffi 0.1.12)  # the newest that works with both TileLang's runtime and FlashInfer
unzip -qo "$wheel" 'tvm_ffi/*' 'apache_tvm_ffi-*' \
  -x '*/3rdparty/libbacktrace/*' '*/src/*'

# FlashInfer's kernel for MLA is built here, since its 40 MB of headers need not travel then. The
# build needs no GPU.
mkdir -p flashinfer_kernels
if command -v nvcc >/dev/null && [ ! -e flashinfer_kernels/batch_mla_sm90.so ]; then
  sources=$(mktemp -d)
  data=$sources/flashinfer/data
  wheel=$(fetch flashinfer-python 0.7.2.post1)
  unzip -qo "$wheel" 'flashinfer/data/csrc/*batch_mla_*' 'flashinfer/data/csrc/tvm_ffi_utils.h' \
    'flashinfer/data/include/*' 'flashinfer/data/cutlass/include/*' \
    'flashinfer/data/cccl/libcudacxx/include/*' 'flashinfer/data/cccl/cub/cub/*' \
    'flashinfer/data/cccl/thrust/thrust/*' -d "$sources"
  sed -E 's/\{\{ dtype_(q|kv|o) \}\}/nv_bfloat16/; s/\{\{ dtype_idx \}\}/int32_t/
    s/\{\{ head_dim_ckv \}\}/512/; s/\{\{ head_dim_kpe \}\}/64/' \
    "$data/csrc/batch_mla_config.jinja" >"$data/csrc/batch_mla_sm90_config.inc"
  includes=()
  for folder in cccl/{libcudacxx/include,cub,thrust} include cutlass/include; do
    includes+=(-I "$data/$folder")
  done
  nvcc -shared -std=c++17 -O3 -use_fast_math -DNDEBUG -Xcompiler -fPIC --expt-relaxed-constexpr \
    -gencode=arch=compute_90a,code=sm_90a -DFLASHINFER_ENABLE_{F16,BF16,FP8_E4M3,FP8_E5M2} \
    "${includes[@]}" -I tvm_ffi/include -I tvm_ffi/3rdparty/dlpack/include \
    "$data"/csrc/batch_mla_sm90_{plan,run,binding}.cu -o flashinfer_kernels/batch_mla_sm90.so -lcuda
  rm -r "$sources"
fi

# FlashInfer's kernel that rotates latents and writes them into the cache.
if command -v nvcc >/dev/null && [ ! -e flashinfer_kernels/rope.so ]; then
  sources=$(mktemp -d)
  data=$sources/flashinfer/data
  wheel=$(fetch flashinfer-python 0.7.2.post1)
  unzip -qo "$wheel" 'flashinfer/data/csrc/*rope*.cu' 'flashinfer/data/csrc/tvm_ffi_utils.h' 'flashinfer/data/include/*' \
    'flashinfer/data/cutlass/include/*' 'flashinfer/data/cccl/libcudacxx/include/*' 'flashinfer/data/cccl/cub/cub/*' \
    'flashinfer/data/cccl/thrust/thrust/*' -d "$sources"
  includes=()
  for folder in cccl/{libcudacxx/include,cub,thrust} include cutlass/include csrc; do
    includes+=(-I "$data/$folder")
  done
  nvcc -shared -std=c++17 -O3 -use_fast_math -DNDEBUG -Xcompiler -fPIC --expt-relaxed-constexpr \
    -gencode=arch=compute_90a,code=sm_90a -DFLASHINFER_ENABLE_{F16,BF16,FP8_E4M3,FP8_E5M2} \
    "${includes[@]}" -I tvm_ffi/include -I tvm_ffi/3rdparty/dlpack/include \
    "$data"/csrc/{rope,flashinfer_rope_binding}.cu -o flashinfer_kernels/rope.so -lcuda
  rm -r "$sources"
fi

# FlashInfer's Hopper kernels for ragged prompts with keys of 192 and values of 128 columns, causal
# or not, without the kernels that read pages.
if command -v nvcc >/dev/null && [ ! -e flashinfer_kernels/batch_prefill_sm90.so ]; then  # takes minutes
  sources=$(mktemp -d)
  data=$sources/flashinfer/data
  wheel=$(fetch flashinfer-python 0.7.2.post1)
  unzip -qo "$wheel" 'flashinfer/data/csrc/batch_prefill_sm90*' 'flashinfer/data/csrc/tvm_ffi_utils.h' \
    'flashinfer/data/include/*' 'flashinfer/data/cutlass/include/*' 'flashinfer/data/cutlass/tools/util/include/*' \
    'flashinfer/data/cccl/libcudacxx/include/*' 'flashinfer/data/cccl/cub/cub/*' \
    'flashinfer/data/cccl/thrust/thrust/*' -d "$sources"
  declared='' arguments='' set=''
  for optional in uint32_t:maybe_prefix_len_ptr uint16_t:maybe_token_pos_in_items_ptr \
                  uint16_t:maybe_max_item_len_ptr float:maybe_scale_v; do
    type=${optional%:*} name=${optional#*:}
    declared+="$type* $name; " arguments+=", Optional<ffi::Tensor> $name"
    set+="params.additional_params.$name = $name ? static_cast<$type*>($name.value().data_ptr()) : nullptr; "
  done
  for number in double:logits_soft_cap double:sm_scale double:scale_v_scalar int64_t:token_pos_in_items_len; do
    type=${number%:*} name=${number#*:}
    declared+="$type $name; " arguments+=", $type $name" set+="params.additional_params.$name = $name; "
  done
  config=$data/csrc/batch_prefill_sm90_config.inc
  sed -E 's/\{\{ dtype_(q|kv|o) \}\}/nv_bfloat16/; s/\{\{ idtype \}\}/int32_t/; s/\{\{ head_dim_qk \}\}/192/
    s/\{\{ head_dim_vo \}\}/128/; s/\{\{ use_(sliding_window|logits_soft_cap) \}\}/false/
    s/\{\{ variant_name \}\}/DefaultAttention<false>/
    s|\{\{ variant_decl \}\}|#include <flashinfer/attention/hopper/variants.cuh>|' \
    "$data/csrc/batch_prefill_sm90_customize_config.jinja" |
    sed "s/{{ additional_params_decl }}/$declared/; s/{{ additional_func_params }}/$arguments/
      s/{{ additional_params_setter }}/$set/" >"$config"
  cat >>"$config" <<'END'
#undef DISPATCH_MASK_MODE
#define DISPATCH_MASK_MODE(mask_mode, MASK_MODE, ...) \
  if (mask_mode == MaskMode::kCausal) { constexpr MaskMode MASK_MODE = MaskMode::kCausal; __VA_ARGS__ } \
  else { constexpr MaskMode MASK_MODE = MaskMode::kNone; __VA_ARGS__ }
END
  parts=("$data"/csrc/batch_prefill_sm90{,_jit_binding}.cu)
  sed -i '/^void BatchPrefillWithPagedKVCacheSM90Run/,/^}/d' "${parts[0]}"
  sed -i '/^void BatchPrefillWithPagedKVCacheSM90Run/,/;$/d; /paged_run/d' "${parts[1]}"
  for mask in kNone kCausal; do
    parts+=("$data/csrc/$mask.cu")
    { echo '#include <flashinfer/attention/hopper/prefill_sm90.cuh>'
      echo '#include "batch_prefill_sm90_config.inc"'
      for same in true false; do
        echo "template cudaError_t flashinfer::BatchPrefillWithRaggedKVCacheDispatched<192, 128, MaskMode::$mask, false,"
        echo "    $same, DefaultAttention<false>>(RaggedParams&, bool, cudaStream_t);"
      done; } >"$data/csrc/$mask.cu"
  done
  includes=()
  for folder in cccl/{libcudacxx/include,cub,thrust} include cutlass/include cutlass/tools/util/include; do
    includes+=(-I "$data/$folder")
  done
  nvcc -shared -std=c++17 -O3 -use_fast_math -DNDEBUG -Xcompiler -fPIC --expt-relaxed-constexpr --expt-extended-lambda \
    -static-global-template-stub=false -gencode=arch=compute_90a,code=sm_90a \
    -DFLASHINFER_ENABLE_{F16,BF16,FP8_E4M3,FP8_E5M2} "${includes[@]}" -I tvm_ffi/include \
    -I tvm_ffi/3rdparty/dlpack/include "${parts[@]}" -o flashinfer_kernels/batch_prefill_sm90.so -lcuda
  rm -r "$sources"
fi

# FlashInfer's checkpointing_ssu for one token and a ring of 16 entries (NPREDICTED and MAX_WINDOW),
# for some types and shapes: type of states, heads, P, N, groups. It does not compile for P = 80. Its
# kernels for varying numbers of tokens and for dt without a softplus are left out.
for of in float:128:64:128:8 bfloat16:128:64:128:8 float:64:64:128:8 bfloat16:64:64:128:8; do
  IFS=: read -r type H P N G <<<"$of"
  library=flashinfer_kernels/checkpointing_ssu_${type/%float/float32}_${H}x${P}x${N}_$G.so
  if ! command -v nvcc >/dev/null || [ -e "$library" ]; then continue; fi  # each takes minutes
  sources=$(mktemp -d)
  data=$sources/flashinfer/data
  wheel=$(fetch flashinfer-python 0.7.2.post1)
  unzip -qo "$wheel" 'flashinfer/data/csrc/checkpointing_ssu*' 'flashinfer/data/csrc/tvm_ffi_utils.h' 'flashinfer/data/include/*' \
    'flashinfer/data/cutlass/include/*' 'flashinfer/data/cccl/libcudacxx/include/*' 'flashinfer/data/cccl/cub/cub/*' \
    'flashinfer/data/cccl/thrust/thrust/*' -d "$sources"
  [ "$type" = float ] || type=nv_$type
  sed -E "s/\{\{ state_dtype \}\}/$type/; s/\{\{ (input|dt)_dtype \}\}/nv_bfloat16/; s/\{\{ (weight|matrixA)_dtype \}\}/float/
    s/\{\{ stateIndex_dtype \}\}/int32_t/; s/\{\{ state_scale_type \}\}/void/; s/\{\{ dim \}\}/$P/; s/\{\{ dstate \}\}/$N/
    s/\{\{ npredicted \}\}/1/; s/\{\{ max_window \}\}/15/; s/\{\{ heads_per_group \}\}/$((H / G))/; s/\{\{ num_groups \}\}/$G/
    s/\{\{ philox_rounds \}\}/0/; s/\{\{ enable_pdl \}\}/true/" \
    "$data/csrc/checkpointing_ssu_customize_config.jinja" >"$data/csrc/checkpointing_ssu_config.inc"
  sed -i 's/if (is_varlen) {/if constexpr (false) {/; s/if (params.dt_softplus) {/if constexpr (true) {/' \
    "$data/include/flashinfer/mamba/launch_checkpointing_ssu.cuh"
  includes=()
  for folder in cccl/{libcudacxx/include,cub,thrust} include cutlass/include csrc; do
    includes+=(-I "$data/$folder")
  done
  nvcc -shared -std=c++20 -O3 -use_fast_math -DNDEBUG -Xcompiler -fPIC --expt-relaxed-constexpr \
    -static-global-template-stub=false -gencode=arch=compute_90a,code=sm_90a -DFLASHINFER_ENABLE_{F16,BF16,FP8_E4M3,FP8_E5M2} \
    "${includes[@]}" -I tvm_ffi/include -I tvm_ffi/3rdparty/dlpack/include \
    "$data"/csrc/checkpointing_ssu{,_kernel_inst,_jit_binding}.cu -o "$library" -lcuda
  rm -r "$sources"
done

clone=$(mktemp -d)
trap 'rm -rf "$clone"' EXIT
if git clone -q --depth 1 --filter=blob:none --no-checkout \
    "${MAMBA_REPOSITORY:-https://github.com/state-spaces/mamba}" "$clone/mamba"; then
  mkdir -p mamba_ssm/ops/triton mamba_ssm/utils
  for file in ops/triton/{selective_state_update,softplus,layernorm_gated,k_activations} \
              ops/triton/ssd_{bmm,chunk_scan,chunk_state,combined,state_passing} \
              utils/{determinism,torch}; do
    git -C "$clone/mamba" show "HEAD:mamba_ssm/$file.py" >"mamba_ssm/$file.py"
  done
  wheel=$(fetch einops 0.8.2)
  unzip -qo "$wheel" 'einops/*'
  version=$(git -C "$clone/mamba" show HEAD:mamba_ssm/__init__.py |
    sed -n 's/^__version__ = "\(.*\)"/\1/p')
  echo "$version ($(git -C "$clone/mamba" rev-parse --short HEAD))" >mamba_ssm/VERSION

  # Its scan of Mamba1 in CUDA, for bfloat16, a float32 A, and B and C of each token alone, without the backward. It
  # needs PyTorch's headers, of TORCH or of the wheel that ./lockstep test brings.
  torch=${TORCH:-$root/.lockstep/wheels/torch}
  mkdir -p mamba_kernels
  if command -v nvcc >/dev/null && [ -e "$torch/include" ] && [ ! -e mamba_kernels/selective_scan.so ]; then  # takes minutes
    sources=$clone/selective_scan
    mkdir "$sources"
    git -C "$clone/mamba" archive HEAD csrc/selective_scan | tar -x --strip-components=2 -C "$sources"
    sed -i 's/BOOL_SWITCH(params.is_variable_.,/ALWAYS(/' "$sources/selective_scan_fwd_kernel.cuh"
    echo '#define ALWAYS(NAME, ...) [&] { constexpr bool NAME = true; return __VA_ARGS__(); }()' >>"$sources/static_switch.h"
    sed -i '/complex_t>/d' "$sources/selective_scan_fwd_bf16.cu"
    { sed -n '/^selective_scan_bwd/q;p' "$sources/selective_scan.cpp" | sed '$d' |
        sed -E 's|#include <torch/python.h>|#include <ATen/ATen.h>\n#include <torch/library.h>\nnamespace torch { using namespace at; }|
          s/using input_t = (at::Half|float);/using input_t = at::BFloat16;/; s/weight_t = c10::complex<float>;/weight_t = float;/'
      cat <<'END'
TORCH_LIBRARY(mamba_ssm, m) {
  m.def("selective_scan_fwd(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus) -> Tensor[]");
  m.impl("selective_scan_fwd", c10::DispatchKey::CUDA, TORCH_FN(selective_scan_fwd));
}
END
    } >"$sources/binding.cpp"
    undefined=()
    for name in HALF_{OPERATORS,CONVERSIONS} BFLOAT16{_OPERATORS,_CONVERSIONS,2_OPERATORS,2_CONVERSIONS}; do
      undefined+=("-U__CUDA_NO_${name}__")
    done
    nvcc -shared -std=c++20 -O3 -use_fast_math -Xcompiler -fPIC --expt-relaxed-constexpr --expt-extended-lambda \
      -gencode=arch=compute_90a,code=sm_90a "${undefined[@]}" -I "$torch/include" -I "$torch/include/torch/csrc/api/include" \
      "$sources/binding.cpp" "$sources/selective_scan_fwd_bf16.cu" -L "$torch/lib" -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda \
      -o mamba_kernels/selective_scan.so
  fi
else
  echo "mamba-ssm: its repository cannot be cloned, so it will be named as absent" >&2
fi

# The static library that a compiled CuTe kernel is linked with has 52 KB and is always staged; the
# compiler is staged only with DSL=1.
for name in nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core \
            nvidia-cutlass-dsl-libs-cu13; do
  wheel=$(fetch "$name" 4.8.0)
  unzip -qo "$wheel" -d "$clone/dsl"
done
mkdir -p flashinfer_kernels
cp "$clone/dsl/nvidia_cutlass_dsl/cu13/lib/libcuda_dialect_runtime_static.a" flashinfer_kernels/
if [ "${DSL:-0}" = 1 ] && [ ! -e cutlass_dsl_libraries.tar.xz ]; then  # the compression takes minutes
  package=$clone/dsl/nvidia_cutlass_dsl
  mv "$clone/dsl/"*.dist-info "$package/"  # the package looks its own version up
  libraries=(dsl_packages/cutlass/_mlir/_mlir_libs cu13/lib/libcute_dsl_runtime.so)
  (cd "$package" && tar -c "${libraries[@]}") |
    xz --x86 --lzma2=preset=6,dict=64MiB -T1 >cutlass_dsl_libraries.tar.xz
  (cd "$package" && rm -rf "${libraries[@]}" dsl_packages/iket cu13/lib/stubs)
  tar -C "$package" -cJf cutlass_dsl_python.tar.xz .
fi

# FlashInfer's decodes and its and FlashQLA's prefills of the gated delta rule are compiled here too, by
# this machine's Python, PyTorch and nvcc, so that their compilers (200 MB) need not travel.
wheel=$(fetch flash-qla 0.1.3)
unzip -qo "$wheel" 'flash_qla/*' -x '*/blackwell*'
echo 0.1.3 >flash_qla/VERSION
wheel=$(fetch tilelang 0.1.15)
mkdir -p tilelang_runtime
unzip -qoj "$wheel" 'tilelang/lib/libtvm_runtime.so' 'tilelang/lib/libstub_*.so' -d tilelang_runtime
if ! command -v nvcc >/dev/null || ! python3 -c 'import torch' 2>/dev/null; then
  echo "FlashInfer's decodes and its and FlashQLA's prefills take nvcc and PyTorch here to be compiled; without them they will be named as absent" >&2
else
  pip install -q --no-deps --no-compile --target "$clone/compilers" nvidia-cutlass-dsl==4.8.0 \
    nvidia-cutlass-dsl-libs-{base,core,cu13}==4.8.0 cuda-bindings==13.0.3 cuda-pathfinder tilelang==0.1.15 \
    apache-tvm-ffi==0.1.12 z3-solver==4.15.4.0 cloudpickle ml-dtypes psutil tqdm
  dsl=$clone/compilers/nvidia_cutlass_dsl
  for peer in flashinfer decodes flashqla; do
    LOCKSTEP_PEERS=$out PYTHONPATH="$dsl/dsl_packages:$dsl:$clone/compilers:${PYTHONPATH:-}" \
      python3 "$root/bench/peers/compile_kernels.py" "$peer"
  done
fi

find . -name '__pycache__' -prune -exec rm -rf {} +
du -sh "$out"
