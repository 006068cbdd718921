#!/usr/bin/env python3
"""llama-server without unified KV: the copy for a second answer (n_cmpl) is only queued. Where both answers are one token,
no decode follows; the next prompt is restored from the host cache, and the queued copy then overwrites its KV.

    python3 llama_queued_copy.py LLAMA_SERVER MODEL.gguf
"""
from llama_server import Judge, Server

server, judge = Server("-np", "2", "--no-kv-unified"), Judge()
B, X, A = list(range(100, 130)), list(range(200, 230)), list(range(30, 60))
first = server.ask(B, 6, id_slot=1)[0]
judge.say("B", B, first)
judge.say("X, so that B goes to the host cache", X, server.ask(X, 6, id_slot=1)[0])
for output in server.ask(A, 1, n_cmpl=2, id_slot=1):
    judge.say("A, two answers", A, output)
again = B + first + [7, 8]
judge.say("B goes on", again, server.ask(again, 6)[0])
judge.end(server)
