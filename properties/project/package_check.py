#!/usr/bin/env python3
# ctest: name=package.debian_and_tarball_hold_the_program labels=quick timeout=900 skip=77 args={build}
"""Makes the Debian package and the tarball of a build, unpacks both, and runs what is in them.

package_check.py BUILD

Headers and objects (lockstep-dev) are left to .ci/bare_package, which also installs the packages in a bare root. Ends
with 77 where dpkg-dev is missing.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The libraries that the program is linked with, by the names of Debian 12.
LIBRARIES = ("libc6", "libfmt9", "libssl3", "libstdc++6", "libzstd1")


def output(*words, **named):
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, check=True, **named).stdout


def make(build, generator, folder):
    """The only package of this kind, without headers and objects."""
    parts = ["program", "python", "examples"] + (["libraries"] if generator == "TGZ" else [])
    output("cpack", "--config", build / "CPackConfig.cmake", "-G", generator, "-B", folder,
           "-D", f"CPACK_COMPONENTS_ALL={';'.join(parts)}", "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=gzip", cwd=build)
    found = [path for path in folder.iterdir() if path.suffix in (".deb", ".gz")]
    assert len(found) == 1, found
    return found[0]


def expect_program(prefix, version, has_judge):
    """The program runs, and it and the Python module find what lies beside them."""
    program = prefix / "bin" / "lockstep"
    assert output(program, "--version").strip() == version
    assert "sglang-no-buffer" in output(program, "list", "policies")
    if has_judge:
        assert "state_copy" in output(program, "list", "operations")
    share = prefix / "share"
    assert "nothing found" in output(program, "replay", "fixtures/traces/finish_keeps_its_state.trace",
                                     cwd=share / "lockstep")
    for shell, path in (("bash", "bash-completion/completions/lockstep"), ("zsh", "zsh/vendor-completions/_lockstep"),
                        ("fish", "fish/vendor_completions.d/lockstep.fish")):
        assert (share / path).read_text() == output(program, "completion", shell), path
    text = "import lockstep; from lockstep import html_parts; print(lockstep.__file__, bool(html_parts.style()))"
    environment = {name: value for name, value in os.environ.items() if name != "LOCKSTEP_PROGRAM"}
    said = output(sys.executable, "-c", text, cwd="/",
                  env={**environment, "PYTHONPATH": str(prefix / "lib/python3/dist-packages"),
                       "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}"})
    assert said.startswith(str(prefix)) and said.endswith("True\n"), said


def main(build):
    missing = [tool for tool in ("cpack", "dpkg-deb", "dpkg-shlibdeps", "file") if not shutil.which(tool)]
    if missing:
        print(f"skipped: {', '.join(missing)} missing")
        return 77
    version = output(build / "lockstep", "--version").strip()
    has_judge = (build / "lockstep-judge").exists()  # as in the package then
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        package = make(build, "DEB", folder / "deb")
        fields = dict(line.split(": ", 1) for line in output("dpkg-deb", "-f", package).splitlines() if ": " in line)
        assert (fields["Package"], fields["Version"]) == ("lockstep", version), fields
        needed = {part.split()[0] for part in fields["Depends"].split(", ")}
        assert needed >= set(LIBRARIES), fields["Depends"]
        output("dpkg-deb", "-x", package, folder / "unpacked")
        assert not list((folder / "unpacked").rglob("libfmt*")), "Debian has this library itself"
        expect_program(folder / "unpacked/usr", version, has_judge)
        print(f"{package.name}: {package.stat().st_size >> 10} KiB, needs {', '.join(sorted(needed))}")

        tarball = make(build, "TGZ", folder / "tgz")
        (folder / "elsewhere").mkdir()
        output("tar", "-xf", tarball, "-C", folder / "elsewhere", "--strip-components=1")
        expect_program(folder / "elsewhere", version, has_judge)
        linked = output("ldd", folder / "elsewhere/bin/lockstep")
        assert f"=> {folder}/elsewhere/" in linked or "libfmt" not in linked, linked
        print(f"{tarball.name}: {tarball.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
