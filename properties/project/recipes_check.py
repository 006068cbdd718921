#!/usr/bin/env python3
# ctest: name=package.recipes_for_ci_work labels=quick timeout=600 skip=77 args={lockstep}
"""Holds the recipes for CI (fixtures/ci) to the program.

recipes_check.py PROGRAM

Each is YAML that GitHub's runners understand, its scripts are bash, and its commands have the words of --help. Then
the scripts run as a runner runs them, in a repository with a sound server and in one with a broken server: sound, they
pass; broken, ctest fails and SARIF names the line, the search leaves a trace, and the comment holds it. The package
is built the first time, and found in the cache the second. apt-get, git, cpack, sudo and gh are stand-ins, and searches
take two seconds. Ends with 77 where Python has no yaml.
"""
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

try:
    import yaml
except ImportError:
    print("skipped: this Python has no yaml (Debian: python3-yaml)")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECIPES = ROOT / "fixtures" / "ci"
TRACE = """# A second turn finds the first one's tokens.
# run: lockstep replay %s --subject 'exec:python3 tests/server.py'
admit id=a tokens=a8
extend id=a n=8
finish id=a
admit id=b tokens=a8
"""


UNCACHED = "steps.lockstep.outputs.cache-hit != 'true'"
# A checkout of Lockstep, and a cpack that asks for what the script has built there.
GIT = r"""#!/bin/sh
for folder; do :; done
mkdir -p "$folder"
printf '#!/bin/sh\nmkdir -p "%s" && touch "%s"\n' "$folder/build/current" "$folder/build/current/CPackConfig.cmake" >"$folder/lockstep"
chmod +x "$folder/lockstep"
"""
CPACK = """#!/bin/sh
[ "$1" = --config ] && [ -e "$2" ] && [ "$7" = -B ] && touch "$8/lockstep_1_amd64.deb"
"""


def steps_of(recipe):
    """The steps of a workflow's jobs; an AssertionError says what a runner would not understand."""
    assert set(recipe) <= {"name", True, "env", "jobs"}, set(recipe)  # YAML 1.1 reads `on` as true
    assert recipe[True] and recipe["jobs"]
    for job in recipe["jobs"].values():
        assert set(job) <= {"runs-on", "container", "permissions", "timeout-minutes", "steps"}, set(job)
        for step in job["steps"]:
            assert set(step) <= {"name", "id", "uses", "with", "run", "if", "env"}, step
            assert step.get("if", UNCACHED) in (UNCACHED, "failure()"), step
            assert ("run" in step) != ("uses" in step), step
            assert re.fullmatch(r"[\w-]+(/[\w-]+)+@v\d+", step.get("uses", "a/b@v1")), step["uses"]
            yield step


def strange_words(program, script):
    """Words after `lockstep` that its --help does not know."""
    said = []
    listed = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    for line in script.splitlines():
        words = shlex.split(line) if line.strip().startswith("lockstep ") else []
        if not words:
            continue
        asked = subprocess.run([program, words[1], "--help"], capture_output=True, text=True)
        if not re.search(rf"^  {words[1]} ", listed, re.M):
            said.append(words[1])
        said += [word for word in words if word.startswith("--") and not re.search(rf"[ ,]{word}\b", asked.stdout)]
    return said


def repository(folder, program, is_sound):
    """Everything that the recipes expect of the repository that they are copied to, and a PATH with stand-ins."""
    for name in ("tests/traces", "cmake", "tools", "temp"):
        (folder / name).mkdir(parents=True)
    server = (ROOT / "fixtures/subjects/minimal_cache.py").read_text()
    broken = server.replace("cached_prefix(caches[salt], tokens[:-1])", "cached_prefix(caches[salt], tokens)")
    assert broken != server
    (folder / "tests/server.py").write_text(server if is_sound else broken)
    (folder / "tests/traces/second_turn.trace").write_text(TRACE)
    (folder / "cmake/traces.cmake").write_text((RECIPES / "traces.cmake").read_text())
    (folder / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(mine LANGUAGES NONE)\n"
                                           "enable_testing()\ninclude(cmake/traces.cmake)\n")
    (folder / "tools/apt-get").write_text("#!/bin/sh\n")
    (folder / "tools/sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (folder / "tools/git").write_text(GIT)
    (folder / "tools/cpack").write_text(CPACK)
    (folder / "tools/gh").write_text('#!/bin/sh\necho "$@" >>gh.log\ncat comment.md >>gh.log\n')
    (folder / "tools/lockstep").write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
    for tool in (folder / "tools").iterdir():
        tool.chmod(0o755)


def play(recipe, folder, is_cached):
    """Runs the scripts of a recipe; whether they all passed. A failure skips the steps without failure()."""
    failed = False
    environment = {**os.environ, **recipe.get("env", {}), "GITHUB_RUN_NUMBER": "7", "RUNNER_TEMP": f"{folder}/temp",
                   "PATH": f"{folder}/tools:{os.environ['PATH']}"}
    for step in steps_of(recipe):
        if "run" not in step or (step.get("if") == "failure()") != failed or (step.get("if") == UNCACHED and is_cached):
            continue
        script = re.sub(r"\$\{\{.*?\}\}", "v1", step["run"])
        script = re.sub(r"--time \d+s", "--time 2s", script)
        own = {name: "1" for name in step.get("env", {})}
        done = subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], cwd=folder,
                              env={**environment, **own}, capture_output=True, text=True)
        failed = failed or done.returncode != 0
        print(done.stdout + done.stderr if done.returncode else "", end="")
    return not failed


def main(program):
    program = os.path.abspath(program)
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(RECIPES.glob("*.yml"))}
    assert set(recipes) == {"ctest", "search", "comment"}, set(recipes)
    for name, recipe in recipes.items():
        for step in steps_of(recipe):
            script = step.get("run", "")
            subprocess.run(["bash", "-n", "-c", script], check=True)
            assert not strange_words(program, script), (name, strange_words(program, script))
        for is_sound in (True, False):
            with tempfile.TemporaryDirectory() as place:
                folder = pathlib.Path(place)
                repository(folder, program, is_sound)
                assert play(recipe, folder, is_cached=not is_sound) == is_sound, (name, is_sound)
                assert (folder / "lockstep.deb").exists() == is_sound, (name, "the package is built where it is not cached")
                traces = [path.read_text() for path in (folder / "findings").glob("*.trace")]
                assert bool(traces) == (not is_sound and name != "ctest"), (name, traces)
                if name == "comment" and not is_sound:
                    assert traces[0] in (folder / "gh.log").read_text()
                if name == "ctest" and not is_sound:
                    assert json.loads((folder / "findings.sarif").read_text())["runs"][0]["results"], "no finding"
        print(f"ok: {name}.yml", flush=True)
    assert strange_words(program, "lockstep explore --tme 3s") == ["--tme"] and strange_words(program, "lockstep xplore")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
