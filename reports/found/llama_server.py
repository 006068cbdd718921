"""llama-server for the reproductions here: a child that is asked, and the same prompt on an empty context.

Programs beside this file take the server and a model: python3 llama_NAME.py LLAMA_SERVER MODEL.gguf. Prompts are token
ids between 3 and 319. Weights are float32 and flash attention is off, so that rounding changes no answer.
"""
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request


class Server:
    def __init__(self, *words):
        if len(sys.argv) < 3:
            sys.exit(f"usage: {sys.argv[0]} LLAMA_SERVER MODEL.gguf")
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.log = tempfile.TemporaryFile()
        command = [sys.argv[1], "-m", sys.argv[2], "--port", str(self.port), "-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32",
                   "--offline", "--no-warmup", "-c", "4096", *words]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        while self.process.poll() is None:
            try:
                self.get("/health")
                return
            except OSError:
                time.sleep(0.02)
        sys.exit(f"the server ended with {self.process.returncode}")

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return json.load(answer)

    def ask(self, prompt, n, **more):
        """The answers, a list of tokens each: one, or one for each of several prompts or copies (n_cmpl)."""
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "top_k": 1, "samplers": ["top_k"], "return_tokens": True,
                "ignore_eos": True, **more}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = json.load(answer)
        return [one["tokens"] for one in sorted(said if isinstance(said, list) else [said], key=lambda one: one["index"])]

    def act(self, slot, action):
        """erase, save or restore of a slot, in a thread which is given back."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/slots/{slot}?action={action}", b"{}",
                                         {"Content-Type": "application/json"})
        thread = threading.Thread(target=lambda: urllib.request.urlopen(request, timeout=60).close())
        thread.start()
        return thread

    def ask_in_thread(self, prompt, n, **more):
        """The same in a thread, which is given back; `said` is the answer after its join()."""
        thread = threading.Thread(target=lambda: setattr(thread, "said", self.ask(prompt, n, **more)))
        thread.start()
        return thread

    def ask_meanwhile(self, prompt, n, **more):
        """Given back when a slot works on it."""
        thread = self.ask_in_thread(prompt, n, **more)
        while thread.is_alive() and not any(slot["is_processing"] for slot in self.get("/slots")):
            time.sleep(0.001)
        return thread

    def stop(self):
        self.process.kill()
        self.process.wait()


class Judge:
    """Compares answers with those of a server that reuses nothing."""

    def __init__(self):
        self.server, self.wrong = Server("-np", "1", "--cache-ram", "0", "--ctx-checkpoints", "0"), 0

    def say(self, name, prompt, output):
        truth = self.server.ask(prompt, len(output), cache_prompt=False)[0]
        at = next((k for k, (said, right) in enumerate(zip(output, truth)) if said != right), None)
        self.wrong += at is not None
        print(f"{name}: {len(prompt)} tokens,", "ok" if at is None else
              f"WRONG from token {at} of {len(output)} on: {output[at:at + 6]} for {truth[at:at + 6]}")

    def end(self, server):
        server.stop()
        self.server.stop()
        print(f"{self.wrong} wrong")
        sys.exit(self.wrong != 0)
