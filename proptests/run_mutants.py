#!/usr/bin/env python3
"""Puts faults into a copy of this tree, one at a time, and sees whether the tests notice.

bazel run //proptests:mutants [-- [--list] [--check] [--jobs N] [NAME...]]

Each file proptests/mutants/NAME.patch is one fault: lines that describe it, then a unified diff.
    Fault: what is wrong, and what one would see
    Seen: where such a fault was reported
    Property: TARGET SUITE.TEST, the test that must fail on it
First every property is run on the unchanged copy: what fails without a fault says nothing about
one. Then, for each fault, it is applied, the property's target built and the property run, and a
line is printed: `killed` when the property failed, `survived` when it passed, `error` when the
fault no longer applies, does not build, or nothing was run; with the name and the seconds. Without
NAMEs all faults are tried.

--list prints the faults, --check only whether each still applies and its property exists.
The copy and its build folder stay in ~/.cache/ppfsdp/mutants, so that a fault costs the rebuild of
what it touches; the output of each run is there too, as NAME.log.
Exit code 0 when every fault was killed, 1 when not, 2 when the call or a patch's description is
wrong or a file cannot be read or written.
"""

import argparse
import dataclasses
import fcntl
import filecmp
import os
import re
import shutil
import subprocess
import sys
import time

FIELDS = ("Fault", "Seen", "Property")


class BadInput(Exception):
    """A call or a description that is wrong; the message is for the user."""


@dataclasses.dataclass
class Mutant:
    name: str
    fault: str
    seen: str
    target: str
    test: str
    diff: str
    files: list


def read_mutant(path):
    """The Mutant that the patch file describes; BadInput when it does not describe one."""
    name = os.path.basename(path)[: -len(".patch")]
    with open(path, encoding="utf-8") as file:
        text = file.read()
    start = re.search(r"^--- ", text, re.MULTILINE)
    if not start:
        raise BadInput(f"{path}: no diff; a line that begins with '--- ' starts it")
    fields, last = {}, None
    for line in text[: start.start()].splitlines():
        key, colon, value = line.partition(":")
        if colon and key in FIELDS:
            if key in fields:
                raise BadInput(f"{path}: two lines '{key}:'")
            fields[key], last = value.strip(), key
        elif line.startswith(" ") and last:
            fields[last] += " " + line.strip()
        elif line.strip():
            raise BadInput(f"{path}: the line '{line}' is none of {', '.join(FIELDS)}")
    for field in FIELDS:
        if not fields.get(field):
            raise BadInput(f"{path}: no line '{field}: ...' before the diff")
    words = fields["Property"].split()
    if len(words) != 2 or not re.fullmatch(r"//[\w/.-]*:[\w.-]+", words[0]) or "." not in words[1]:
        raise BadInput(
            f"{path}: the property is '{fields['Property']}'; "
            "it should read like //proptests:clip_property_test Suite.test"
        )
    diff = text[start.start() :]
    files = re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE)
    if not files or len(files) != len(re.findall(r"^--- a/\S+", diff, re.MULTILINE)):
        raise BadInput(f"{path}: the diff's files should be named --- a/FILE and +++ b/FILE")
    return Mutant(name, fields["Fault"], fields["Seen"], words[0], words[1], diff, files)


def read_mutants(root, names):
    """The named mutants, or all; BadInput for a name that is none."""
    folder = os.path.join(root, "proptests", "mutants")
    found = os.listdir(folder) if os.path.isdir(folder) else []
    known = sorted(f[: -len(".patch")] for f in found if f.endswith(".patch"))
    if not known:
        raise BadInput(f"no patch in {folder}")
    for name in names:
        if name not in known:
            raise BadInput(f"no mutant '{name}'; there are: {', '.join(known)}")
    return [read_mutant(os.path.join(folder, name + ".patch")) for name in names or known]


def run_patch(tree, mutant, *options):
    """(whether GNU patch took the diff, what it said). No fuzz: a hunk's context must be there."""
    command = ["patch", "-p1", "--fuzz=0", "--batch", "--no-backup-if-mismatch", *options]
    done = subprocess.run(
        command,
        cwd=tree,
        input=mutant.diff,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode == 0, done.stdout


def why_not_applicable(tree, mutant):
    """Why the mutant cannot be tried on `tree`, in one line; nothing when it can."""
    missing = [file for file in mutant.files if not os.path.isfile(os.path.join(tree, file))]
    if missing:
        return f"there is no file {missing[0]} any more"
    applies, output = run_patch(tree, mutant, "--dry-run")
    if not applies:
        return "no longer applies: " + " ".join(output.split())
    package, _, rule = mutant.target[2:].partition(":")
    try:
        with open(os.path.join(tree, package, "BUILD"), encoding="utf-8") as file:
            build = file.read()
    except OSError:
        return f"there is no package //{package}"
    found = re.search(rf'^cc_test\(\n    name = "{re.escape(rule)}",\n(.*?)^\)', build, re.M | re.S)
    if not found:
        return f"there is no test {mutant.target}"
    suite, _, case = mutant.test.partition(".")
    test = re.compile(rf"\bTEST(_F)?\(\s*{re.escape(suite)},\s*{re.escape(case)}\)")
    for source in re.findall(r'"([^"]+\.cc)"', found.group(1)):
        with open(os.path.join(tree, package, source), encoding="utf-8") as file:
            if test.search(file.read()):
                return None
    return f"there is no test {mutant.test} in {mutant.target}"


def tree_files(root):
    """What belongs to the tree, as paths below `root`: what git has and what is new where this is a
    checkout, without what git ignores; else all but Bazel's links."""
    if os.path.exists(os.path.join(root, ".git")) and shutil.which("git"):
        listed = subprocess.run(
            ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            text=True,
            stdout=subprocess.PIPE,
            check=False,
        )
        if listed.returncode == 0:
            paths = {path for path in listed.stdout.split("\0") if path}
            return sorted(path for path in paths if os.path.isfile(os.path.join(root, path)))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s != ".git" and not s.startswith("bazel-")]
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                files.append(os.path.relpath(path, root))
    return sorted(files)


def copy_tree(root, tree):
    """Makes `tree` what `root` is. Files that are the same stay untouched, so that Bazel rebuilds
    nothing for them."""
    files = tree_files(root)
    for stale in set(tree_files(tree) if os.path.isdir(tree) else []) - set(files):
        os.remove(os.path.join(tree, stale))
    for file in files:
        source, copy = os.path.join(root, file), os.path.join(tree, file)
        if not os.path.isfile(copy) or not filecmp.cmp(source, copy, shallow=False):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            shutil.copy(source, copy)


class Workshop:
    """The copy of the tree with its build."""

    def __init__(self, root, home, jobs):
        self.root, self.home, self.jobs = root, home, jobs
        self.tree = os.path.join(home, "tree")

    def bazel(self, log, *arguments):
        """Runs Bazel in the copy; its exit code, and what was printed, which `log` keeps too."""
        # What `bazel run` sets describes the outer workspace.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("BUILD_", "TEST_"))}
        with open(os.path.join(self.home, log), "w+", encoding="utf-8", errors="replace") as file:
            code = subprocess.run(
                ["./bazelw", f"--output_base={self.home}/build", "--max_idle_secs=60", *arguments],
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
            file.seek(0)
            return code, file.read()

    def test(self, mutants, log):
        """Builds and runs the properties of these mutants, which have one target. ("passed",
        "failed" or what else happened, in words; never both). An unbuilt target is no failed test,
        and a run of no test no passed one."""
        tests = ":".join(sorted({m.test for m in mutants}))
        code, output = self.bazel(
            log,
            "test",
            mutants[0].target,
            f"--test_filter={tests}",
            "--test_output=all",
            "--experimental_convenience_symlinks=ignore",
            "--noshow_progress",
            *([f"--jobs={self.jobs}"] if self.jobs else []),
        )
        ran = re.search(r"^\[=+\] Running (\d+) tests? from", output, re.MULTILINE)
        if code not in (0, 3):
            return "not built"
        if ran and int(ran.group(1)) != tests.count(":") + 1:
            return f"ran {ran.group(1)} of {tests.count(':') + 1} tests"
        if code == 0:
            return "passed" if ran else "ran no test"
        return "failed"

    def failing_without_fault(self, mutants):
        """{property: what happened} of those that do not pass in the unchanged copy."""
        result = {}
        for target in sorted({m.target for m in mutants}):
            of_target = [m for m in mutants if m.target == target]
            log = "unchanged" + target.replace("/", "_").replace(":", "_") + ".log"
            outcome = self.test(of_target, log)
            if outcome == "failed":  # Which of them?
                for mutant in {m.test: m for m in of_target}.values():
                    alone = self.test([mutant], log)
                    if alone != "passed":
                        result[target, mutant.test] = alone
            elif outcome != "passed":
                result.update({(target, m.test): outcome for m in of_target})
        return result

    def try_mutant(self, mutant):
        """("killed", "survived" or "error", the reason of an error)."""
        reason = why_not_applicable(self.tree, mutant)
        if reason:
            return "error", reason
        originals = {}
        for file in mutant.files:
            with open(os.path.join(self.tree, file), "rb") as source:
                originals[file] = source.read()
        try:
            applied, output = run_patch(self.tree, mutant)
            if not applied:
                return "error", "no longer applies: " + " ".join(output.split())
            outcome = self.test([mutant], mutant.name + ".log")
        finally:
            for file, content in originals.items():
                with open(os.path.join(self.tree, file), "wb") as source:
                    source.write(content)
        if outcome == "failed":
            return "killed", ""
        if outcome == "passed":
            return "survived", ""
        return "error", f"{outcome}; see {os.path.join(self.home, mutant.name + '.log')}"


def report(word, name, seconds, note):
    print(f"{word:<8}  {name:<40}  {seconds:6.1f} s" + (f"  {note}" if note else ""), flush=True)


def check(root, mutants):
    wrong = 0
    for mutant in mutants:
        reason = why_not_applicable(root, mutant)
        if reason:
            wrong += 1
            print(f"{mutant.name}: {reason}")
    print(f"{len(mutants)} mutants, {wrong} of which cannot be tried")
    return 1 if wrong else 0


def try_all(root, mutants, jobs):
    home = os.path.join(os.path.expanduser("~"), ".cache", "ppfsdp", "mutants")
    os.makedirs(home, exist_ok=True)
    with open(os.path.join(home, "lock"), "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"another run of the mutants is at work in {home}") from None
        workshop = Workshop(root, home, jobs)
        counts = {"killed": 0, "survived": 0, "error": 0}
        try:
            copy_tree(root, workshop.tree)
            start = time.monotonic()
            unfit = workshop.failing_without_fault(mutants)
            properties = {(m.target, m.test) for m in mutants}
            print(f"without a fault {len(properties) - len(unfit)} of {len(properties)} properties "
                  f"pass: {time.monotonic() - start:.1f} s", flush=True)
            for mutant in mutants:
                start = time.monotonic()
                outcome = unfit.get((mutant.target, mutant.test))
                if outcome:
                    word, note = "error", f"its property {outcome} without the fault"
                else:
                    word, note = workshop.try_mutant(mutant)
                counts[word] += 1
                report(word, mutant.name, time.monotonic() - start, note)
        finally:
            workshop.bazel("shutdown.log", "shutdown")
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return 0 if counts["killed"] == len(mutants) else 1


def main(arguments, root):
    parser = argparse.ArgumentParser(
        prog="bazel run //proptests:mutants --",
        description="Tries whether the tests notice faults that are put into the code.",
    )
    parser.add_argument("--list", action="store_true", help="print the faults")
    parser.add_argument("--check", action="store_true",
                        help="print which faults no longer apply; build nothing")
    parser.add_argument("--jobs", type=int, metavar="N", help="as Bazel's")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the faults to try, else all")
    options = parser.parse_args(arguments)
    try:
        if options.jobs is not None and options.jobs < 1:
            raise BadInput(f"--jobs is {options.jobs}; it should be 1 or more")
        if not shutil.which("patch"):
            raise BadInput("GNU patch is missing, which applies the faults: apt install patch")
        mutants = read_mutants(root, options.names)
        if options.list:
            for mutant in mutants:
                print(f"{mutant.name}\n    {mutant.fault}\n    Seen: {mutant.seen}\n"
                      f"    Property: {mutant.target} {mutant.test}")
            return 0
        if options.check:
            return check(root, mutants)
        return try_all(root, mutants, options.jobs)
    except (BadInput, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    here = os.path.dirname(os.path.realpath(__file__))
    workspace = os.environ.get("BUILD_WORKSPACE_DIRECTORY", os.path.dirname(here))
    sys.exit(main(sys.argv[1:], os.path.realpath(workspace)))
