#!/usr/bin/env python3
"""llama-server: a context checkpoint that holds one token more than the common prefix stays, and is given to a later
prompt. One slot, default options, one request after the other; any hybrid or recurrent model.

    python3 llama_stale_checkpoint.py LLAMA_SERVER MODEL.gguf
"""
from llama_server import Judge, Server

server, judge = Server("-np", "1"), Judge()
for name, prompt in (("A leaves a checkpoint after its first token", [224, 195, 51, 24, 60]),
                     ("B shares no token with A", [317]),
                     ("C shares its first token with B", [317, 187])):
    judge.say(name, prompt, server.ask(prompt, 3)[0])
judge.end(server)
