"""Lockstep's operators with the signatures of other libraries and servers.

    from lockstep.ops import selective_state_update, causal_conv1d_update
    from lockstep.ops import mamba_chunk_scan_combined, causal_conv1d_fn, chunk_gated_delta_rule
    from lockstep.ops import fused_recurrent_gated_delta_rule
    from lockstep.ops import vllm, sglang                        # the same names, with their slots

lockstep.ops has the functions of flash-linear-attention, mamba-ssm and causal-conv1d;
lockstep.ops.vllm and lockstep.ops.sglang have those servers' functions. CUDA tensors run the
kernels on the current stream, CPU tensors the references; no function waits for the device.
Layouts are converted by views if strides allow. An argument that no operator supports raises
NotImplementedError with its name; a wrong shape raises an error with the argument, the expected
and the given shape. There are no gradients: asking a result for one is an error.

torch.ops.lockstep has the operators themselves (kernels/torch/operators.md).
"""

from . import _library  # noqa: F401  comes first: its ImportError says what is missing
from . import sglang, vllm
from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .mamba_ssm import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule",
           "fused_recurrent_gated_delta_rule", "mamba_chunk_scan_combined",
           "selective_scan_fn", "selective_state_update", "sglang", "vllm"]
