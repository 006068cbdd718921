#!/bin/sh
# torch_python.sh SCRIPT WORDS…: runs SCRIPT with the Python that LOCKSTEP_PYTHON names, or python3. Without PyTorch there
# it says so and ends with 77, which ctest takes for skipped.
python=${LOCKSTEP_PYTHON:-python3}
export PYTHONPATH="${LOCKSTEP_TORCH_DIR:+$(dirname "$LOCKSTEP_TORCH_DIR"):}$PYTHONPATH"
if ! "$python" -c 'import torch' 2>/dev/null; then
  echo "skipped: $python cannot import torch"
  exit 77
fi
exec "$python" "$@"
