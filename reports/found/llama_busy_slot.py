#!/usr/bin/env python3
"""llama-server: a request that names a slot at work has its prompt's state loaded into that slot before it is put off, and
the answer there goes on after another prompt. Default options (--cache-ram is on), one slot is enough; any model.

    python3 llama_busy_slot.py LLAMA_SERVER MODEL.gguf
"""
from llama_server import Judge, Server

server, judge = Server("-np", "1"), Judge()
B = list(range(100, 140))
judge.say("B", B, server.ask(B, 4)[0])
A = list(range(200, 240))
judge.say("another prompt, so that B goes to the host cache", A[:20], server.ask(A[:20], 4)[0])
running = server.ask_meanwhile(A, 400)
second = server.ask(B, 4, id_slot=0)[0]
running.join()
judge.say("A, which was being answered when B named its slot", A, running.said[0])
judge.say("B again", B, second)
judge.end(server)
