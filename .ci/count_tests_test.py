#!/usr/bin/env python3
"""Each test names what CI would report wrongly if it failed."""

import json
import os
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import count_tests

# As Google Test writes it: one passed, one failed twice over, one skipped, one disabled.
GOOGLE_TEST = """<testsuites tests="4" failures="1" disabled="1"><testsuite name="A">
<testcase name="A" status="run" result="completed" classname="T"/>
<testcase name="B" status="run" result="completed" classname="T">
<failure message="1" type=""/><failure message="2" type=""/></testcase>
<testcase name="C" status="run" result="skipped" classname="T"><skipped message="no GPU"/></testcase>
<testcase name="DISABLED_D" status="notrun" result="suppressed" classname="T"/>
</testsuite></testsuites>"""
# As Bazel writes it for a test that wrote none: it crashed, timed out or is no Google Test.
BAZEL_ERROR = """<testsuites><testsuite name="t" tests="1" failures="0" errors="1">
<testcase name="t" status="run"><error message="exited with error code 134"/></testcase>
</testsuite></testsuites>"""
BAZEL_PASSED = """<testsuites><testsuite name="t" tests="1" failures="0" errors="0">
<testcase name="t" status="run"></testcase></testsuite></testsuites>"""
PASSED = '<testsuites><testsuite><testcase name="A" status="run"/></testsuite></testsuites>'


class CountTests(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.events = []

    def configured(self, label, size="SMALL", tags=()):
        event = {"targetKind": "cc_test rule", "testSize": size} if size else {"targetKind": "x"}
        if tags:
            event["tag"] = list(tags)
        self.events.append({"id": {"targetConfigured": {"label": label}}, "configured": event})

    def completed(self, label, **outcome):
        self.events.append({"id": {"targetCompleted": {"label": label}}, **outcome})

    def result(self, label, status, xml, shard=1, attempt=1):
        path = os.path.join(self.folder, "%d of %s.xml" % (len(self.events), label.strip("/:")))
        outputs = [{"name": "test.log", "uri": "file:///log"}]
        if xml is not None:
            with open(path, "w") as file:
                file.write(xml)
            uri = "file://" + path.replace(" ", "%20")
            outputs.append({"name": "test.xml", "uri": uri})
        identity = {"label": label, "run": 1, "shard": shard, "attempt": attempt}
        event = {"testActionOutput": outputs, "status": status}
        self.events.append({"id": {"testResult": identity}, "testResult": event})

    def target(self, label, status, xml):
        self.configured(label)
        self.result(label, status, xml)

    def count(self, exit_code):
        lines = [json.dumps(event) for event in self.events]
        return count_tests.count(lines, exit_code)

    # Cases would be counted as targets, or skipped and disabled ones as passed.
    def test_counts_cases(self):
        self.target("//a", "FAILED", GOOGLE_TEST)
        self.target("//b", "PASSED", PASSED)
        self.assertEqual(self.count(3), ([2, 1, 1], ["//a: FAILED"]))

    # A crash would pass unseen.
    def test_a_crash_a_time_out_and_a_lost_xml_are_one_failed_case_each(self):
        self.target("//crash", "FAILED", BAZEL_ERROR)
        self.target("//slow", "TIMEOUT", "")
        self.target("//lost", "FAILED", None)
        # It passed each case and then died on its way out, as under a sanitizer.
        self.target("//late", "FAILED", PASSED)
        passed, wrong = self.count(3)
        self.assertEqual(passed, [1, 4, 0])
        self.assertEqual(
            wrong,
            [
                "//%s: %s" % failed
                for failed in (
                    ("crash", "FAILED"),
                    ("late", "FAILED"),
                    ("lost", "FAILED"),
                    ("slow", "TIMEOUT"),
                )
            ],
        )

    def test_a_test_without_cases_of_its_own_is_one_passed_case(self):
        self.target("//sh", "PASSED", BAZEL_PASSED)
        self.target("//no_xml", "PASSED", None)
        self.assertEqual(self.count(0), ([2, 0, 0], []))

    # A test that no longer compiles would just vanish from the count.
    def test_a_test_that_was_not_built_failed(self):
        self.target("//b", "PASSED", PASSED)
        self.configured("//broken")
        self.configured("//library", size=None)
        self.assertEqual(self.count(1), ([1, 1, 0], ["//broken: not run, its build failed"]))

    # CI would demand a GPU, or not see that what needs one no longer compiles.
    def test_tests_for_a_gpu_need_only_be_built(self):
        self.target("//b", "PASSED", PASSED)
        for label in ("//gpu:built", "//gpu:broken", "//gpu:run", "//cpu:not_run"):
            self.configured(label, tags=["gpu"] if "gpu" in label else ["other"])
        self.completed("//gpu:built", completed={"success": True})
        self.completed("//gpu:broken", completed={"failureDetail": {}})
        self.completed("//gpu:run", completed={"success": True})
        self.result("//gpu:run", "PASSED", PASSED)
        self.completed("//cpu:not_run", completed={"success": True})
        not_run = "not run, its build failed"
        wrong = ["//cpu:not_run: " + not_run, "//gpu:broken: " + not_run]
        self.assertEqual(self.count(1), ([2, 2, 0], wrong))

    # Each test that needs --config=cuda would fail the CPU run.
    def test_a_test_that_the_build_leaves_out_is_not_counted(self):
        self.target("//b", "PASSED", PASSED)
        self.configured("//cuda")
        self.completed("//cuda", aborted={"reason": "SKIPPED"})
        self.configured("//not_analysed")
        self.completed("//not_analysed", aborted={"reason": "ANALYSIS_FAILURE"})
        wrong = ["//not_analysed: not run, its build failed"]
        self.assertEqual(self.count(1), ([1, 1, 0], wrong))

    # The second run would hide the first one's failures, or one that did not start would not count.
    def test_runs_add_up(self):
        self.target("//b", "FAILED", GOOGLE_TEST)
        path = os.path.join(self.folder, "events")
        with open(path, "w") as file:
            file.write("\n".join(json.dumps(event) for event in self.events))
        missing = os.path.join(self.folder, "missing")
        self.assertEqual(
            count_tests.count_runs([("cpu", path, "3"), ("cuda", path, "3"), ("x", missing, "0")]),
            (
                [2, 3, 2],
                ["cpu: //b: FAILED", "cuda: //b: FAILED", "x: bazel ended with exit code 1"],
            ),
        )

    # A broken library or BUILD file that no test uses would pass unseen.
    def test_a_run_that_failed_otherwise_is_one_failed_case(self):
        self.target("//b", "PASSED", PASSED)
        self.assertEqual(self.count(1), ([1, 1, 0], ["bazel ended with exit code 1"]))

    def test_shards_add_up_and_the_last_attempt_decides(self):
        self.configured("//a")
        self.result("//a", "FAILED", GOOGLE_TEST, shard=1, attempt=1)
        self.result("//a", "PASSED", PASSED, shard=1, attempt=2)
        self.result("//a", "PASSED", PASSED, shard=2)
        self.assertEqual(self.count(0), ([2, 0, 0], []))

    # A run that was ended in the middle would count as one without tests.
    def test_events_cut_short(self):
        self.target("//b", "PASSED", PASSED)
        lines = [json.dumps(event) for event in self.events] + ['{"id": {"tes']
        self.assertEqual(count_tests.count(lines, 8)[0], [1, 1, 0])
        self.assertEqual(count_tests.count([], 0), ([0, 0, 0], []))


if __name__ == "__main__":
    unittest.main()
