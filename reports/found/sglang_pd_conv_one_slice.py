#!/usr/bin/env python3
"""SGLang 0.5.23, prefill and decode apart with unequal tensor parallelism: the conv state of Mamba-2
models is cut into slices as if it were one segment. For each model, the channels that the decode
ranks get, by the sender's own function, beside those that their layers own.

Needs SGLang's classes alone, and no GPU.

    python3 sglang_pd_conv_one_slice.py              # with SGLang installed
    python3 sglang_pd_conv_one_slice.py --repaired   # the configs say what their segments are
"""

import ast
import pathlib
import sys
import typing
from types import SimpleNamespace

import sglang.srt.configs.falcon_h1 as falcon_h1
import sglang.srt.configs.granitemoehybrid as granite
import sglang.srt.configs.nemotron_h as nemotron_h
import sglang.srt.configs.qwen3_next as qwen3_next

# The sender's own function, alone: its file imports the whole server.
source = (pathlib.Path(nemotron_h.__file__).parents[1] / "disaggregation" / "utils.py").read_text()
function = next(node for node in ast.parse(source).body
                if getattr(node, "name", "") == "compute_mamba_state_slice_blocks")
names = {"List": list, "Tuple": tuple, "Optional": typing.Optional}
exec(compile(ast.Module([function], []), "disaggregation/utils.py", "exec"), names)
compute_mamba_state_slice_blocks = names["compute_mamba_state_slice_blocks"]

MODELS = {
    "Nemotron-H": (nemotron_h, nemotron_h.NemotronHConfig),
    "Falcon-H1": (falcon_h1, falcon_h1.FalconH1Config),
    "Granite 4 hybrid": (granite, granite.GraniteMoeHybridConfig),
    "Qwen3-Next": (qwen3_next, qwen3_next.Qwen3NextConfig),
}


def segments_of(shape, config):
    """x, B and C, as `mamba_v2_sharded_weight_loader` shards them (layers/attention/mamba/mamba.py),
    or q, k and v."""
    if isinstance(config, qwen3_next.Qwen3NextConfig):
        return list(shape.conv_shard_groups)
    groups = (shape.conv_dim - shape.intermediate_size) // 2
    return [shape.intermediate_size, groups, groups]


def page(segments, ranks, rank):
    """The channels of a rank's conv state, in their order in its page."""
    channels, begin = [], 0
    for size in segments:
        own = size // ranks
        channels += range(begin + rank * own, begin + (rank + 1) * own)
        begin += size
    return channels


def wrong_channels(segments, groups, senders, receivers):
    """Channels of all decode ranks that hold another channel than their own after the transfer."""
    wrong = 0
    for receiver in range(receivers):
        due = page(segments, receivers, receiver)
        got = [None] * len(due)
        for sender in range(senders):
            if receivers > senders and receiver // (receivers // senders) != sender:
                continue
            source = page(segments, senders, sender)
            for first, target, count in compute_mamba_state_slice_blocks(
                    len(source), len(due), senders, receivers, receiver, sender, groups):
                got[target:target + count] = source[first:first + count]
        wrong += sum(is_ != due_ for is_, due_ in zip(got, due))
    return wrong


for name, (module, Config) in MODELS.items():
    module.get_parallel = lambda: SimpleNamespace(attn_tp_size=1)
    module.linear_attn_tp_size = lambda: 1
    config = Config()
    # Of config.json: fields for which the classes have no defaults.
    config.n_groups, config.full_attention_interval = 8, 4
    shape = config.mamba2_cache_params.shape
    segments = segments_of(shape, config)
    groups = segments if "--repaired" in sys.argv else shape.conv_shard_groups
    counts = ", ".join(f"{senders} to {receivers}: {wrong_channels(segments, groups, senders, receivers)}"
                       for senders, receivers in ((1, 2), (2, 1), (1, 4)))
    print(f"{name}, {sum(segments)} channels, wrong after a transfer from {counts}")
