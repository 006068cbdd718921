#!/bin/sh
# torch_ops_check.sh LIBRARY: the CPU half of torch_ops_check.py with the Python that LOCKSTEP_PYTHON names, or
# python3. Without PyTorch there it says so and ends with 77, which ctest takes for skipped.
folder=$(dirname "$0")
python=${LOCKSTEP_PYTHON:-python3}
export PYTHONPATH="${LOCKSTEP_TORCH_DIR:+$(dirname "$LOCKSTEP_TORCH_DIR"):}$PYTHONPATH"
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "skipped: $python cannot import torch"
  exit 77
fi
exec "$python" "$folder/torch_ops_check.py" "$1" --device cpu --backend aot_eager
