#!/usr/bin/env python3
# ctest: name=python.sweep_on_engines labels=full timeout=1200 args="--program {lockstep}"
"""`lockstep sweep` on the engines of fixtures/cluster: GNU parallel, Slurm with two nodes, Dask, Ray, and the schema of Kubernetes.

sweep_engines_test.py --program PROGRAM [unittest's words]

A plan has the same merged bytes on every one of them. An engine that is not installed is skipped with the reason.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PACKAGE = str(ROOT / "cache_sim" / "python")
CLUSTER = ROOT / "fixtures" / "cluster"
sys.path.insert(0, PACKAGE)
sys.path.insert(0, str(ROOT / "properties" / "support"))
import program_tests  # noqa: E402
import slurm  # noqa: E402
from lockstep.sweep import merge, plan, shard  # noqa: E402

SETTINGS = """
    [sweep]
    traces = 4000
    unit = 250
    [policies]
    [mine]
    subject = cache.py:WastefulLruCache
    traces = 90
    unit = 30
    [grid]
    compare = sessions:requests=100
    policies = radix, sglang-no-buffer
    capacity = 1GiB, 16GiB
    """
SHARDS = 12


class Engines(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lockstep-test-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "cache.py").write_text((ROOT / "fixtures" / "subjects" / "lru_cache.py").read_text())
        (self.folder / "sweep.ini").write_text(textwrap.dedent(SETTINGS))
        self.environment = {**os.environ, "PYTHONPATH": PACKAGE, "LOCKSTEP": os.environ["LOCKSTEP_PROGRAM"]}

    def plan(self, shards, name="plan"):
        return plan.make_plan(self.folder / "sweep.ini", shards, self.folder / name)

    def outcome(self, made):
        report = merge.merge(made.folder)[0]
        self.assertEqual((report["missing"], report["missing_to_shrink"], report["foreign"], report["own_findings"]), ([], [], [], []))
        self.assertTrue(report["canaries"][0]["found"])
        self.assertTrue(report["findings"])
        return {name: (made.folder / name).read_bytes() for name in ("sweep.json", "index.html")}

    def alone(self):
        """The outcome of the whole plan as one shard in this process."""
        made = self.plan(1, "alone")
        for shrinks in (False, True):
            self.assertEqual(shard.run(made, 0, shrinks)[0], 0)
            merge.merge(made.folder)
        return self.outcome(made)

    def test_gnu_parallel(self):
        if not shutil.which("parallel"):
            self.skipTest("there is no GNU parallel: apt-get install parallel")
        wanted = self.alone()
        for shards in (1, 7, 64):
            made = self.plan(shards, f"plan{shards}")
            for shrink in ("", " --shrink"):
                done = subprocess.run(["parallel", "-j2", f"$LOCKSTEP sweep run {made.folder}{shrink} #", ":::", *map(str, range(shards))],
                                      env=self.environment, capture_output=True, text=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                merge.merge(made.folder)
            self.assertEqual(self.outcome(made), wanted)

    def test_dask(self):
        try:
            import distributed
        except ImportError:
            self.skipTest("Python has no distributed: pip install distributed")
        environment = self.with_lockstep_on_the_path()
        os.environ.update(PATH=environment["PATH"], PYTHONPATH=PACKAGE)
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
            self.play_by("dask_sweep.py", environment, cluster.scheduler_address)

    def test_ray(self):
        try:
            import ray
        except ImportError:
            self.skipTest("Python has no ray: pip install ray")
        environment = {**self.with_lockstep_on_the_path(), "RAY_TMPDIR": str(self.folder / "ray"), "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "ray.scripts.scripts"]
        subprocess.run([*command, "start", "--head", "--num-cpus=2", "--include-dashboard=false", "--port=0", "--temp-dir", environment["RAY_TMPDIR"]],
                       env=environment, check=True, capture_output=True)
        try:
            self.play_by("ray_sweep.py", environment)
        finally:
            subprocess.run([*command, "stop", "--force"], env=environment, capture_output=True)

    def with_lockstep_on_the_path(self):
        """An environment in which the word `lockstep` is the program of these tests."""
        programs = self.folder / "bin"
        programs.mkdir()
        (programs / "lockstep").symlink_to(self.environment["LOCKSTEP"])
        return {**self.environment, "PATH": f"{programs}:{os.environ['PATH']}"}

    def play_by(self, recipe, environment, *words):
        """Plays a plan as a recipe does; what is merged is what one process would have."""
        made = self.plan(SHARDS)
        for shrink in ([], ["--shrink"]):
            done = subprocess.run([sys.executable, str(CLUSTER / recipe), *words, str(made.folder), *shrink], env=environment, capture_output=True,
                                  text=True)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            merge.merge(made.folder)
        self.assertEqual(self.outcome(made), self.alone())

    def test_the_job_of_kubernetes_has_its_schema(self):
        try:
            import kubernetes_validate
            import yaml
        except ImportError:
            self.skipTest("Python has no kubernetes_validate: pip install kubernetes-validate")
        job = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())
        kubernetes_validate.validate(job, "1.29", strict=True)
        self.assertEqual(job["spec"]["completionMode"], "Indexed")
        job["spec"]["shards"] = 3
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(job, "1.29", strict=True)

    def test_the_recipes_of_ray_and_dask_are_fifteen_lines(self):
        for name in ("ray_sweep.py", "dask_sweep.py"):
            text = (CLUSTER / name).read_text()
            compile(text, name, "exec")
            self.assertLessEqual(sum(1 for line in text.splitlines() if line.strip()), 15, name)


class Slurm(Engines):
    def setUp(self):
        if missing := slurm.missing():
            self.skipTest(missing)
        super().setUp()
        self.cluster = self.enterContext(slurm.Cluster(self.folder / "cluster"))

    def handed(self):
        """The variables that the job's tasks see beside those of the cluster."""
        return {name: self.environment[name] for name in ("PYTHONPATH", "LOCKSTEP", "LOCKSTEP_PROGRAM")}

    def array(self, made, *words):
        return self.cluster.submit("--requeue", f"--array=0-{made.shards - 1}", str(CLUSTER / "slurm.sh"), str(made.folder), *words, **self.handed())

    def said(self):
        return "".join(file.read_text() for file in sorted((self.folder / "cluster").glob("job-*.out")))

    def test_slurm(self):
        wanted = self.alone()
        for shards in (1, 7, 64):
            made = self.plan(shards, f"plan{shards}")
            for words in ((), ("--shrink",)):
                self.cluster.finish(self.array(made, *words), seconds=600)
                merge.merge(made.folder)
            self.assertEqual(self.outcome(made), wanted, self.said())

    def test_the_line_of_the_readme(self):
        told = re.search(r"^sbatch (--requeue) --array=0-1 (fixtures/cluster/slurm\.sh) small\b", (ROOT / "README.md").read_text(), re.M)
        made = plan.make_plan(CLUSTER / "small.ini", 2, self.folder / "small")
        checkout = self.folder / "checkout"  # the program that slurm.sh finds by itself
        checkout.mkdir()
        (checkout / "lockstep").symlink_to(self.environment["LOCKSTEP"])
        self.cluster.finish(self.cluster.submit(told[1], "--array=0-1", str(ROOT / told[2]), str(made.folder), cwd=checkout,
                                                **{**self.handed(), "LOCKSTEP": ""}))
        self.assertEqual(merge.merge(made.folder)[0]["status"], 0, self.said())

    def test_a_node_that_dies_in_the_middle_loses_nothing(self):
        """kill -9 of the slurmd of b: its step goes on, and its index is played again on a."""
        made = self.plan(6)
        first = self.folder / "first"
        slow = self.folder / "slow.sh"
        # The first shard on b waits before it plays, until the copy of it on a is done: the orphan writes last.
        slow.write_text(f"""#!/bin/sh
            if [ "$SLURMD_NODENAME" = b ] && ln -s $SLURM_ARRAY_TASK_ID {first} 2>/dev/null; then
              while [ ! -e {made.folder}/done/$SLURM_ARRAY_TASK_ID.json ]; do sleep 0.1; done
              $LOCKSTEP sweep run {made.folder} --again
              echo $? >{self.folder}/orphan
              exit
            fi
            exec $LOCKSTEP sweep run {made.folder}
            """.replace("            ", ""))
        job = self.cluster.submit("--requeue", "--array=0-5", str(slow), **self.handed())
        self.cluster.wait(lambda: first.is_symlink(), "b plays no shard")
        self.cluster.kill_node("b")
        self.cluster.finish(job, seconds=300)
        index = os.readlink(first)
        self.cluster.wait((self.folder / "orphan").exists, "the orphan has not ended")
        self.assertEqual((self.folder / "orphan").read_text(), "0\n", self.said())
        self.assertEqual(sorted(int(file.stem) for file in made.folder.glob("done/*.json")), list(range(6)), self.said())
        self.assertIn(f"shard {index} is done already, with the same bytes", self.said())
        self.cluster.start_node("b")
        merge.merge(made.folder)
        self.cluster.finish(self.array(made, "--shrink"))
        self.assertEqual(self.outcome(made), self.alone())

    def test_the_cost_of_the_engine(self):
        """Prints how much longer two lanes take than the shards that they play: in a plain loop, and under Slurm. Times are no test."""
        (self.folder / "sweep.ini").write_text(f"[sweep]\ntraces = {os.environ.get('LOCKSTEP_SWEEP_TRACES', 20000)}\nunit = 1000\n")
        looped, made = self.plan(SHARDS, "looped"), self.plan(SHARDS)

        def more_than_shards(folder, start):
            """Elapsed time of two lanes, by the seconds of the shards, less 1."""
            elapsed = time.monotonic() - start
            shards = [json.loads(file.read_text())["seconds"] for file in folder.glob("times-done/*.json")]
            return f"{elapsed:.1f} s, {100 * (2 * elapsed / sum(shards) - 1):.1f} % more than the shards"

        start = time.monotonic()
        loop = f"for lane in 0 1; do (for i in $(seq $lane 2 {SHARDS - 1}); do $LOCKSTEP sweep run {looped.folder} --index $i; done) & done; wait"
        subprocess.run(["sh", "-c", loop], env=self.environment, check=True, stdout=subprocess.DEVNULL)
        said = more_than_shards(looped.folder, start)
        start = time.monotonic()
        self.cluster.finish(self.array(made), seconds=900)
        print(f"a plain loop {said}; Slurm's array {more_than_shards(made.folder, start)}", file=sys.stderr)
        for one in (looped, made):
            merge.merge(one.folder)
        self.assertEqual((looped.folder / "sweep.json").read_bytes(), (made.folder / "sweep.json").read_bytes())
        self.assertEqual(json.loads((made.folder / "sweep.json").read_text())["missing"], [])


def load_tests(loader, tests, pattern):
    """Engines' tests are Slurm's base class; they run once."""
    suite = unittest.TestSuite()
    for case in (Engines, Slurm):
        suite.addTests(case(name) for name in loader.getTestCaseNames(case) if name in case.__dict__)
    return suite


if __name__ == "__main__":
    program_tests.main(__doc__)
