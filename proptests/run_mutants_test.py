#!/usr/bin/env python3
"""Each test names what the mutants' verdicts would be worth if it failed.

The tree is a small one, with a script for Bazel that "builds" and "runs" by looking at one file.
"""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import textwrap
import unittest

HERE = os.path.dirname(os.path.realpath(__file__))
sys.path.insert(0, HERE)
sys.dont_write_bytecode = True  # HERE is the tree itself.
import run_mutants  # pylint: disable=wrong-import-position

# Passes while the code says "right"; "broken" does not build, "wrong" fails the test, "hidden" is
# not seen by it. Without a test that is asked for it runs none, as Google Test does.
BAZEL = """#!/bin/bash
echo "$*" >> "$HOME/calls"
[[ " $* " == *" shutdown "* ]] && exit 0
grep -q broken src/code.cc && { echo "error: expected ';'"; exit 1; }
call=$*
filter=${call#*--test_filter=}
filter=${filter%% *}
tests=$(tr : '\\n' <<< "$filter" | grep -c '^Suite\\.[ab]$')
echo "[==========] Running $tests tests from 1 test suite."
grep -q wrong src/code.cc && { echo "[  FAILED  ] Suite.a"; exit 3; }
grep -q 'crash' src/code.cc && { echo "Segmentation fault"; exit 3; }
grep -q "fails: ${filter}\\$" src/code.cc && exit 3
[[ $filter == *:* ]] && grep -q "fails:" src/code.cc && exit 3
exit 0
"""
BUILD = """cc_test(
    name = "code_test",
    srcs = ["code_test.cc"],
)
"""
TESTS = "TEST(Suite, a) {}\nTEST(Suite, b) {}\nTEST(Suite, not_there_when_run) {}\n"


def patch(new, old="right", prop="//src:code_test Suite.a", file="src/code.cc", head=None):
    head = head or f"Fault: it is {new}.\nSeen: nowhere\nProperty: {prop}\n"
    return (
        head + f"\n--- a/{file}\n+++ b/{file}\n"
        f"@@ -1,3 +1,3 @@\n before\n-it is {old}\n+it is {new}\n after\n"
    )


class RunMutants(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = os.path.join(folder.name, "home")
        self.root = os.path.join(folder.name, "root")
        os.makedirs(self.home)
        home = os.environ.get("HOME")
        self.addCleanup(lambda: os.environ.update({"HOME": home} if home else {}))
        os.environ["HOME"] = self.home
        self.write("bazelw", BAZEL)
        os.chmod(os.path.join(self.root, "bazelw"), 0o755)
        self.write("src/BUILD", BUILD)
        self.write("src/code.cc", "before\nit is right\nafter\n")
        self.write("src/code_test.cc", TESTS)

    def write(self, path, text):
        path = os.path.join(self.root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def mutant(self, name, *arguments, **keywords):
        self.write(f"proptests/mutants/{name}.patch", patch(*arguments, **keywords))

    def run_it(self, *arguments):
        """(exit code, lines of standard output without their times, standard error)."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = run_mutants.main(list(arguments), self.root)
            except SystemExit as end:  # argparse's way
                code = end.code
        lines = [" ".join(w for w in line.split()) for line in out.getvalue().splitlines()]
        return code, lines, err.getvalue()

    def calls(self):
        with open(os.path.join(self.home, "calls"), encoding="utf-8") as file:
            return file.read().splitlines()

    def verdict(self, name):
        """(exit code, "killed" and so on, what is said beside it)."""
        code, lines, error = self.run_it(name)
        self.assertEqual(error, "")
        line = next(line.split() for line in lines if f" {name} " in line)
        return code, line[0], " ".join(line[4:])

    def test_a_fault_that_fails_its_property_is_killed(self):
        self.mutant("m", "wrong")
        self.assertEqual(self.verdict("m"), (0, "killed", ""))

    def test_a_crash_kills_too(self):
        self.mutant("m", "a crash")
        self.assertEqual(self.verdict("m"), (0, "killed", ""))

    def test_a_fault_that_nothing_notices_survives(self):
        self.mutant("m", "hidden")
        self.assertEqual(self.verdict("m"), (1, "survived", ""))

    def test_a_fault_that_does_not_build_is_not_killed(self):
        self.mutant("m", "broken")
        code, word, note = self.verdict("m")
        self.assertEqual((code, word), (1, "error"))
        self.assertRegex(note, r"^not built; see .*/m\.log$")

    def test_a_run_of_no_test_is_neither(self):
        self.mutant("m", "hidden", prop="//src:code_test Suite.not_there_when_run")
        code, word, note = self.verdict("m")
        self.assertEqual((code, word), (1, "error"))
        self.assertEqual(note, "its property ran 0 of 1 tests without the fault")

    def test_a_property_that_fails_without_the_fault_says_nothing(self):
        self.write("src/code.cc", "before\nit is right\nafter\nfails: Suite.a\n")
        self.mutant("of_a", "wrong")
        self.mutant("of_b", "wrong", prop="//src:code_test Suite.b")
        code, lines, _ = self.run_it()
        self.assertEqual(code, 1)
        self.assertRegex(lines[0], r"^without a fault 1 of 2 properties pass: ")
        self.assertRegex(lines[1], r"^error of_a .* its property failed without the fault$")
        self.assertRegex(lines[2], r"^killed of_b ")
        self.assertEqual(lines[3], "1 killed, 0 survived, 1 error")

    def test_a_tree_that_does_not_build_kills_nothing(self):
        self.write("src/code.cc", "before\nit is right\nafter\nbroken\n")
        self.mutant("m", "wrong")
        code, word, note = self.verdict("m")
        self.assertEqual((code, word), (1, "error"))
        self.assertEqual(note, "its property not built without the fault")

    def test_each_fault_is_alone_in_the_tree(self):
        self.mutant("first", "wrong")
        self.mutant("second", "hidden")
        code, lines, _ = self.run_it()
        self.assertEqual(code, 1)
        self.assertRegex(lines[1], r"^killed first ")
        self.assertRegex(lines[2], r"^survived second ")
        copy = os.path.join(self.home, ".cache/ppfsdp/mutants/tree/src/code.cc")
        with open(copy, encoding="utf-8") as file:
            self.assertIn("it is right", file.read())

    def test_the_tree_itself_is_never_touched(self):
        self.mutant("m", "wrong")
        self.run_it()
        with open(os.path.join(self.root, "src/code.cc"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "before\nit is right\nafter\n")

    def test_a_patch_that_no_longer_applies(self):
        self.mutant("m", "wrong", old="as it once was")
        code, word, note = self.verdict("m")
        self.assertEqual((code, word), (1, "error"))
        self.assertRegex(note, r"^no longer applies: .*FAILED")

    def test_a_file_test_or_target_that_is_gone(self):
        self.mutant("file", "wrong", file="src/gone.cc")
        note = "there is no file src/gone.cc any more"
        self.assertEqual(self.verdict("file")[1:], ("error", note))
        for prop, note in (
            ("//src:gone_test Suite.a", "there is no test //src:gone_test"),
            ("//gone:code_test Suite.a", "there is no package //gone"),
            ("//src:code_test Suite.gone", "there is no test Suite.gone in //src:code_test"),
        ):
            self.mutant("gone", "wrong", prop=prop)
            code, lines, _ = self.run_it("--check")
            self.assertEqual(code, 1)
            self.assertIn(f"gone: {note}", lines)

    def test_changes_reach_the_copy(self):
        self.mutant("m", "hidden")
        self.assertEqual(self.verdict("m")[1], "survived")
        self.mutant("m", "wrong")
        self.write("src/new.cc", "new\n")
        self.assertEqual(self.verdict("m")[1], "killed")
        copy = os.path.join(self.home, ".cache/ppfsdp/mutants/tree/src/new.cc")
        self.assertTrue(os.path.isfile(copy))
        os.remove(os.path.join(self.root, "src/new.cc"))
        self.run_it()
        self.assertFalse(os.path.exists(copy))

    def test_in_a_checkout_what_git_ignores_stays_out(self):
        self.mutant("m", "wrong")
        self.write(".gitignore", "/ignored\n")
        self.write("ignored", "")
        subprocess.run(["git", "-C", self.root, "init", "-q"], check=True)
        self.assertIn("src/code.cc", run_mutants.tree_files(self.root))
        self.assertNotIn("ignored", run_mutants.tree_files(self.root))
        self.assertEqual(self.verdict("m")[1], "killed")

    def test_bazel_is_asked_for_that_test_in_a_build_folder_of_its_own(self):
        self.mutant("m", "wrong")
        self.run_it("--jobs", "1")
        calls = self.calls()
        self.assertEqual(len(calls), 3)  # unchanged, with the fault, shutdown
        for call in calls:
            self.assertIn(f"--output_base={self.home}/.cache/ppfsdp/mutants/build", call)
        for call in calls[:2]:
            self.assertIn("test //src:code_test --test_filter=Suite.a ", call)
            self.assertIn("--jobs=1", call)
        self.assertTrue(calls[2].endswith("shutdown"))

    def test_bad_calls(self):
        self.assertEqual(self.run_it()[0], 2)  # No patch at all.
        self.mutant("m", "wrong")
        code, _, error = self.run_it("n")
        self.assertEqual((code, error), (2, "no mutant 'n'; there are: m\n"))
        self.assertEqual(self.run_it("--jobs", "0")[0], 2)
        self.assertEqual(self.run_it("--nonsense")[0], 2)

    def test_bad_descriptions(self):
        fault, seen = "Fault: f\n", "Seen: s\n"
        prop = "Property: //src:code_test Suite.a\n"
        for head, said in (
            (seen + prop, "no line 'Fault: ...' before the diff"),
            (fault + prop, "no line 'Seen: ...' before the diff"),
            (fault + seen, "no line 'Property: ...' before the diff"),
            (fault + seen + prop + prop, "two lines 'Property:'"),
            (fault + seen + prop + "Falt: g\n", "the line 'Falt: g' is none of Fault, Seen,"),
            (fault + seen + "Property: code_test\n", "the property is 'code_test'; it should read"),
        ):
            self.mutant("m", "wrong", head=head)
            code, _, error = self.run_it()
            self.assertEqual(code, 2)
            self.assertIn(said, error)
            self.assertEqual(error.count("\n"), 1)
        self.write("proptests/mutants/m.patch", fault + seen + prop)
        self.assertIn("no diff", self.run_it()[2])

    def test_two_runs_do_not_share_the_copy(self):
        self.mutant("m", "wrong")
        home = os.path.join(self.home, ".cache/ppfsdp/mutants")
        os.makedirs(home)
        with open(os.path.join(home, "lock"), "w", encoding="utf-8") as lock:
            run_mutants.fcntl.flock(lock, run_mutants.fcntl.LOCK_EX)
            code, _, error = self.run_it()
        self.assertEqual(code, 2)
        self.assertIn("another run of the mutants is at work", error)

    def test_a_cache_that_cannot_be_made_is_one_line(self):
        self.mutant("m", "wrong")
        with open(os.path.join(self.home, ".cache"), "w", encoding="utf-8"):
            code, _, error = self.run_it()
        self.assertEqual(code, 2)
        self.assertRegex(error, r"^\[Errno \d+\] .*\.cache/ppfsdp'\n$")

    def test_without_patch_it_says_what_to_install(self):
        self.mutant("m", "wrong")
        path = os.environ["PATH"]
        self.addCleanup(lambda: os.environ.update({"PATH": path}))
        os.environ["PATH"] = self.home
        code, _, error = self.run_it("--check")
        self.assertEqual((code, error.count("\n")), (2, 1))
        self.assertIn("apt install patch", error)

    def test_list(self):
        head = "Fault: one\n  and more.\nSeen: here\nProperty: //src:code_test Suite.a\n"
        self.mutant("m", "wrong", head=head)
        code, lines, _ = self.run_it("--list")
        self.assertEqual(code, 0)
        self.assertEqual(
            lines, ["m", "one and more.", "Seen: here", "Property: //src:code_test Suite.a"]
        )


class TheRealOnes(unittest.TestCase):
    """The tree's own patches, without building: a fault that no longer applies shows in CI."""

    def test_every_patch_applies_and_names_a_property(self):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = run_mutants.main(["--check"], os.path.dirname(HERE))
        self.assertEqual(code, 0, textwrap.indent(out.getvalue(), "  "))


if __name__ == "__main__":
    unittest.main()
