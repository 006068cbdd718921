"""Lockstep's operators with the signatures that people have.

    from lockstep.ops import selective_state_update, causal_conv1d_update
    from lockstep.ops import mamba_chunk_scan_combined, causal_conv1d_fn, chunk_gated_delta_rule
    from lockstep.ops import fused_recurrent_gated_delta_rule
    from lockstep.ops import vllm, sglang                        # the same names, with their slots

Here are the functions of flash-linear-attention, mamba-ssm and causal-conv1d; lockstep.ops.vllm
and lockstep.ops.sglang have those servers' functions. CUDA tensors run the kernels on the current
stream, CPU tensors the references; nothing waits for the device. Layouts are views wherever
strides allow. What no operator can do raises NotImplementedError with the argument's name, a wrong
shape an error that names the argument, what was expected and what came. There are no gradients:
asking a result for one is an error.

torch.ops.lockstep has the operators themselves (kernels/torch/operators.md).
"""

from . import _library  # noqa: F401  before the others: it says what is missing
from . import sglang, vllm
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .mamba_ssm import mamba_chunk_scan_combined, selective_state_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule",
           "fused_recurrent_gated_delta_rule", "mamba_chunk_scan_combined",
           "selective_state_update", "sglang", "vllm"]
