"""Judges a running server from outside: random requests, each compared with an answer from an empty cache.

    python -m lockstep.server search llama --program llama-server --model tiny.gguf --requests 1000
    python -m lockstep.server search openai --program 'my_server --port {port}' --truth 'my_server --no-cache --port {port}'
    python -m lockstep.server replay findings/llama-1.json

`./lockstep server …` is the same. A search draws the server's options and the clients' requests from its seed,
sends them, writes the answers as a log and lets `lockstep check-log` compare it with the truth: the same prompts, greedy,
one after another, sent to a server that reuses nothing. A finding is shrunk by starting the server again and again, and
ends as a few requests: NAME.json, which `replay` plays, and NAME.py, which needs the server and Python alone.

The parts: `steps` (what clients do), `engines` (how a server is started and asked), `drawing` (random configurations
and steps), `life` (one server from its start to its end), `truth`, `verdict`, `shrinking`, `reproduction` (NAME.py),
`search` and `command`.
"""
