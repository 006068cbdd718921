"""Writes a finding as a program that needs only Python and the server."""
from __future__ import annotations

import json
import pathlib
import pprint

from lockstep.server.engines import Engine
from lockstep.server.steps import ASK, Kept

TEXT = '''#!/usr/bin/env python3
"""{title}

{words}

Each request is sent to one server; then every prompt is asked again, greedy, of a server that reuses nothing.
Found and shrunk by `lockstep server search`. It is seen in {odds}.
"""
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

PROGRAM = sys.argv[1:2] or {program}
MODEL = sys.argv[2] if len(sys.argv) > 2 else {model}
SERVER = {server}
EMPTY = {truth}
# Name, path, body, prompts, and what the client waits for before the next request: its answer, its start, nothing.
REQUESTS = {requests}


def start(words):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    put = {{"{{port}}": str(port), "{{model}}": MODEL, "{{folder}}": FOLDER.name}}
    words = [put.get(word, word.replace("{{port}}", str(port)).replace("{{model}}", MODEL)) for word in words]
    server = subprocess.Popen(PROGRAM + words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{{port}}{ready}", timeout=1).close()
            return server, port
        except OSError:
            time.sleep(0.02)
    sys.exit(f"the server ended with {{server.returncode}}")


def send(port, path, body):
    """The answers: lists of tokens."""
    request = urllib.request.Request(f"http://127.0.0.1:{{port}}{{path}}", json.dumps(body).encode(),
                                     {{"Content-Type": "application/json"}})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return outputs(json.load(answer))


{started}
{outputs}

FOLDER = tempfile.TemporaryDirectory()
server, port = start(SERVER)
said, running = {{}}, []
for name, path, body, prompts, wait in REQUESTS:

    def client(name=name, path=path, body=body):
        try:
            said[name] = send(port, path, body)
        except Exception as error:
            said[name] = error

    running.append(threading.Thread(target=client))
    running[-1].start()
    if wait == "answer":
        running[-1].join()
    while wait == "start" and running[-1].is_alive() and not started(port, body):
        time.sleep(0.001)
for thread in running:
    thread.join()
server.kill()
server.wait()

empty, port = start(EMPTY)
wrong = 0
for name, path, body, prompts, wait in REQUESTS:
    if not prompts or isinstance(said[name], Exception):
        print(name, path, said[name] if isinstance(said[name], Exception) else "done")
        wrong += bool(prompts)
        continue
    for k, output in enumerate(said[name]):
        prompt = prompts[k * len(prompts) // len(said[name])]
        truth = send(port, path, {alone})[0]
        wrong += output != truth
        print(f"{{name}} prompt of {{len(prompt)}} tokens: {{output}}", "ok" if output == truth else f"WRONG, for {{truth}}")
empty.kill()
empty.wait()
print(f"{{wrong}} wrong")
sys.exit(wrong != 0)
'''


def script(engine: Engine, kept: Kept) -> str:
    """The program's text."""
    folder = pathlib.Path("{folder}")
    config = {**kept.config, "model": "{model}"}
    # A number that occurs nowhere else in the command stands for the port.
    words = [[word.replace("59999", "{port}") for word in make(config, 59999, folder)]
             for make in (engine.words, engine.truth_words)]
    program = words[0][:engine.program_size()]
    server, truth = (one[len(program):] if one[:len(program)] == program else one for one in words)
    requests = [(step.id, *engine.request(step), step.prompts if step.do == ASK else [], step.wait)
                for step in kept.steps]
    text = kept.finding.text.replace("\\", "\\\\").replace('"', "'")  # the text is part of a docstring
    title = f"{kept.finding.kind}: {text}"
    plain = {name: value for name, value in kept.config.items() if name != "model"}
    return TEXT.format(
        title=title, words="Configuration: " + json.dumps(plain), program=json.dumps(program),
        odds="every run" if kept.plays == 1 else f"nearly every {kept.plays} runs", model=json.dumps(kept.config["model"]),
        server=json.dumps(server), truth=json.dumps(truth), ready=engine.ready_path,
        requests=pprint.pformat(requests, width=118, compact=True, sort_dicts=False), outputs=engine.outputs_source, started=engine.started_source,
        alone=engine.alone_source)


def write(engine: Engine, kept: Kept, path: pathlib.Path) -> None:
    path.write_text(script(engine, kept))
