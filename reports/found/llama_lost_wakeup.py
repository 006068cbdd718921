#!/usr/bin/env python3
"""llama-server: a request waits for a slot, and so does an action on that slot (erase, save, restore) that came before it.
When the slot is free the action is carried out, and nothing looks at the request again: the slot is idle, and the request
waits until another one comes and ends. One slot, any model.

    python3 llama_lost_wakeup.py LLAMA_SERVER MODEL.gguf
"""
import sys
import tempfile
import time

from llama_server import Server

SECONDS = 10  # the answer takes a hundredth of one
folder = tempfile.TemporaryDirectory()
server = Server("-np", "1", "--slot-save-path", folder.name)
running = server.ask_meanwhile(list(range(100, 140)), 1000)
erase = server.act(0, "erase")
time.sleep(0.05)  # it waits for the slot now
waits = server.ask_in_thread(list(range(200, 240)), 4)
running.join()
erase.join()
print("the running request is answered, the slot is erased")
waits.join(SECONDS)
hangs = waits.is_alive()
idle = not any(slot["is_processing"] for slot in server.get("/slots"))
print(f"the request that came last: {'HANGS' if hangs else 'answered'}; the slot is {'idle' if idle else 'at work'}")
if hangs:
    server.ask([5, 6, 7], 1)
    waits.join(SECONDS)
    print(f"after one more request: {'HANGS' if waits.is_alive() else 'answered'}")
server.stop()
sys.exit(hangs)
