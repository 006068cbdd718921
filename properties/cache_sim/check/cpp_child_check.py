#!/usr/bin/env python3
# ctest: name=subjects.cpp_child_answers labels=quick timeout=600 args="{lockstep} {cxx}"
"""A cache in C++ behind the protocol: cache_sim/check/subject_child.hpp and the example that uses it.

cpp_child_check.py PROGRAM COMPILER

The example compiles as C++17 with the standard library alone; its answers to lines of the protocol are right; a search
finds nothing in it, and finds its planted mistake. Whatever a child does, each line has one line as its answer.
"""
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "fixtures/subjects/block_cache.cpp"

# A line, and what the child answers. Blocks have 16 tokens.
SAID = [
    ("hello protocol=1 kv_tokens=64", "levels=request again=1 honours="),
    ("admit id=a tokens=a20+[7,4000000000]+b8:20", "cached=0"),
    ("extend id=a n=34", "n=34"),
    ("admit id=same tokens=a5+a5:20+[7]+[4000000000]+b8:20+c1", "cached=32"),
    ("admit id=short tokens=a16", "cached=0"),  # one token at least is computed
    ("admit id=shifted tokens=a1:20+[7,4000000000]+b8:21+c9", "cached=0"),
    ("admit id=id tokens=a20+[8,4000000000]+b8:20+c1", "cached=16"),
    ("admit id=salted tokens=a40 salt=s", "cached=0"),
    ("check", "unsupported"),
    ("hello protocol=1 kv_tokens=64", "levels=request again=1 honours="),
    ("admit id=b tokens=a40", "cached=0"),  # everything is forgotten
]

CARELESS = r"""
#include "cache_sim/check/subject_child.hpp"
int main() {
  return lockstep::child::serve("levels=request", [](const lockstep::child::Line& line) -> std::string {
    std::cout << "a line of its own" << std::endl;
    if (line.verb() == "extend") return "n=" + std::to_string(line.number("n")) + "\n";
    if (line.verb() == "step") throw std::runtime_error("two\nlines");
    if (line.verb() == "abort") throw 7;
    return "cached_tokens=" + line.spelled(line.tokens());
  });
}
"""
CAREFUL = [
    ("hello protocol=1", "levels=request"),
    ("extend id=a n=5", "n=5 "),
    ("extend id=a n=x", "raised=field n=x is no number"),
    ("step", "raised=two lines"),
    ("abort id=a", "raised=what is no std::exception"),
    ("admit id=a tokens=b3:5+b5+zz2:4+[7,8,7]+b1", "cached_tokens=b3:5+b0:5+zz2:4+[7]+[8]+[7]+b0:1"),
    ("admit id=a tokens=", "cached_tokens=[]"),  # an answer of no tokens that Lockstep reads
]


def answers(child, lines):
    return subprocess.run([child], input="".join(line + "\n" for line in lines), capture_output=True, text=True,
                          check=True).stdout.splitlines()


def main(program, compiler):
    with tempfile.TemporaryDirectory() as folder:
        child = f"{folder}/block_cache"
        subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", ROOT, EXAMPLE, "-o", child], check=True)
        heard = answers(child, [line for line, _ in SAID])
        assert heard == [reply for _, reply in SAID], list(zip(SAID, heard))
        unknown, = answers(child, ["extend id=nobody n=1"])
        assert unknown.startswith("raised="), unknown

        careless = f"{folder}/careless"
        subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", ROOT, "-x", "c++", "-", "-o", careless],
                       input=CARELESS, text=True, check=True)
        heard = answers(careless, [line for line, _ in CAREFUL])
        assert heard == [reply for _, reply in CAREFUL], list(zip(CAREFUL, heard))

        def explore(*words):
            return subprocess.run([program, "explore", "--traces", "300", "--out", f"{folder}/findings", "--subject",
                                   f"exec:{' '.join([child, *words])}"], capture_output=True, text=True)

        sound, broken = explore(), explore("publishes-early")
        assert sound.returncode == 0, sound
        assert broken.returncode == 11 and broken.stdout.startswith("cached-too-much:"), broken
    print("the example in C++ answers as it should, and its mistake is found")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
