#!/usr/bin/env python3
"""transformers 5.23.0: the exported model's own `generate` leaves one position of the cache unwritten.

    python3 transformers_static_generate.py        # with transformers and PyTorch installed
"""

import sys

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache as Exportable

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, initializer_range=0.5)
model = Qwen3ForCausalLM(config).eval()
model.generation_config.update(
    use_cache=True, cache_implementation="static", eos_token_id=None, pad_token_id=0)
prompt = torch.tensor([[5, 17, 42]])
words = {"input_ids": torch.ones(1, 1).long(), "cache_position": torch.zeros(1).long()}
with torch.no_grad():
    wrapped = Exportable(model, batch_size=1, max_cache_len=32)
    program = torch.export.export(wrapped, (), kwargs=words, strict=False)
    theirs = Exportable.generate(program, prompt, 8)
    keys = dict(program.named_buffers())["key_cache_0"]
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)

print("generate() of the model       ", expected[0].tolist())
print("generate() of the exported one", theirs[0].tolist())
print("positions of the cache with a key of 0:", (keys[0, 0].abs().sum(-1) == 0).nonzero().ravel().tolist())
sys.exit(int(not torch.equal(theirs, expected)))
