"""The two actions of `python -m lockstep.static_kv`."""

import json
import logging
import os
import shutil
import sys
import time
import warnings

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from .export import check_folder, check_model, check_sizes, index_there, loaded, write
from .runtime import Refused, StaticKvModel

#: The files of a tokenizer; a checkpoint may lack some.
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
             "added_tokens.json", "chat_template.jinja")


def say(text):
    print(text, end="", file=sys.stderr, flush=True)


def quiet():
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def run(asked):
    quiet()
    if asked.action == "export":
        export(asked)
    else:
        generate(asked)


def config_of(folder):
    """The configuration of a checkpoint. Its model_type is checked before transformers reads it."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path) as file:
            name = json.load(file).get("model_type")
    except (OSError, ValueError, AttributeError):
        raise Refused(f"{path}: cannot be read") from None
    if name != "qwen3":
        raise Refused(f"{path}: model_type is {name!r}: only 'qwen3' can be exported")
    return transformers.Qwen3Config.from_pretrained(folder)


def export(asked):
    config = config_of(asked.checkpoint)
    dtype = getattr(torch, asked.dtype) if asked.dtype else config.dtype or torch.float32
    check_model(config, dtype)
    check_sizes(config, asked.rows, asked.context, asked.buckets)
    check_folder(asked.out)
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda: there is no GPU")
    causal = model_of(asked.checkpoint, dtype, asked.device)
    begin = time.monotonic()
    write(causal, asked.out, asked.rows, asked.context, asked.buckets, in_place=(), strict=asked.strict, say=say)
    for name in TOKENIZER:
        if os.path.isfile(os.path.join(asked.checkpoint, name)):
            shutil.copy(os.path.join(asked.checkpoint, name), asked.out)
    say(f"{asked.out} after {time.monotonic() - begin:.0f} s\n")


def model_of(folder, dtype, device):
    try:
        causal, found = transformers.Qwen3ForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    except Exception as error:  # of safetensors, of huggingface_hub, of PyTorch
        raise Refused(f"{folder}: its weights cannot be read: {str(error).splitlines()[0]}") from None
    for name in sorted(found["missing_keys"]):
        raise Refused(f"{folder}: {name} is missing")
    return causal.eval().to(device)


class Progress(BaseStreamer):
    """Shows on a terminal how many tokens each row has."""

    def __init__(self):
        self.calls = -1  # the first call has the prompt

    def put(self, value):
        self.calls += 1
        if sys.stderr.isatty():
            say(f"\r{self.calls} tokens ")

    def end(self):
        if sys.stderr.isatty():
            say("\r\033[K")


def prompts_of(asked, vocabulary):
    """[[token]], and the tokenizer that made them, if one did."""
    if asked.tokens:
        prompts, tokenizer = asked.tokens, None
    elif not os.path.isfile(os.path.join(asked.package, "tokenizer_config.json")):
        raise Refused(f"{asked.package}: there is no tokenizer for --text; --tokens needs none")
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(asked.package)
        prompts = [tokenizer(text)["input_ids"] for text in asked.text]
    for token in (token for row in prompts for token in row):
        if not 0 <= token < vocabulary:
            raise Refused(f"token {token} is not below the vocabulary's {vocabulary}")
    return prompts, tokenizer


@torch.no_grad()
def generate(asked):
    index = index_there(asked.package)
    dtype, device = getattr(torch, index["dtype"]), index["device"]
    config = config_of(asked.package)
    prompts, tokenizer = prompts_of(asked, config.vocab_size)
    causal = model_of(asked.package, dtype, device)
    causal.model = StaticKvModel(causal.config, loaded(asked.package), index["rows"], index["positions"], dtype,
                                 device=device)
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
    texts = causal.generate(ids, attention_mask=mask, max_new_tokens=asked.new_tokens, do_sample=False, temperature=None,
                            top_p=None, top_k=None, pad_token_id=0, streamer=Progress())
    stop = causal.generation_config.eos_token_id
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    for row in texts[:, longest:].tolist():
        ends = [at for at, token in enumerate(row) if token in stop]
        row = row[: ends[0] + 1] if ends else row
        print(tokenizer.decode(row, skip_special_tokens=True) if tokenizer else ",".join(map(str, row)))
