#!/usr/bin/env python3
"""llama-server --spec-type draft-mtp with three slots and a unified KV: a rolled-back draft reads another sequence's
snapshot. A hybrid model with a block for multi-token prediction (Qwen3.5). Three clients send prompts and answers of many
lengths, so that prompts meet verifications in a batch; without drafts, or with two slots, every answer is right.

    python3 llama_moved_snapshots.py LLAMA_SERVER MODEL.gguf
"""
import random
import threading

from llama_server import Judge, Server

REQUESTS = 40  # of each client
draw = random.Random(7)
document = [draw.randrange(3, 320) for _ in range(2000)]


def client(server, seed, answers):
    own = random.Random(seed)
    for _ in range(REQUESTS):
        at, size, n = own.randrange(1900), own.choice((1, 5, 9, 20, 33, 60)), own.choice((1, 2, 3, 5, 8, 12))
        answers.append((document[at:at + size], server.ask(document[at:at + size], n, cache_prompt=False)[0]))


judge = Judge()
server = Server("-np", "3", "--kv-unified", "--spec-type", "draft-mtp", "--cache-ram", "0", "--ctx-checkpoints", "0")
answers = []
threads = [threading.Thread(target=client, args=(server, seed, answers)) for seed in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for number, (prompt, output) in enumerate(answers):
    judge.say(f"answer {number}", prompt, output)
judge.end(server)
