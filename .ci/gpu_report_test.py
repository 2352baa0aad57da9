#!/usr/bin/env python3
"""Each test names what the report would say wrongly if it failed."""

import json
import os
import sys
import tempfile
import unittest
import zipfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import gpu_report

# As Google Test writes it: one passed with figures, two failed, one skipped.
CASES = """<testsuites tests="3" failures="1"><testsuite name="Memory">
<testcase name="Backward" status="run" result="completed" time="1.25" classname="Memory"><properties>
<property name="backward_peak" value="104857600"/><property name="backward_bound" value="209715200"/>
<property name="gathers_overlapped" value="11 of 12"/></properties></testcase>
<testcase name="Forward" status="run" result="completed" time="0.5" classname="Memory">
<failure message="peak 2 | bound 1&#x0A;more" type=""/></testcase>
<testcase name="Long" status="run" result="completed" time="0" classname="Memory">
<failure message="%s" type=""/></testcase>
<testcase name="TwoGpus" status="run" result="skipped" time="0" classname="Memory">
<skipped message="needs two GPUs, there is 1"/></testcase></testsuite></testsuites>""" % ("x" * 9000)
PASSED = '<testsuites><testsuite><testcase name="A" status="run"/></testsuite></testsuites>'


def timing(program, world, median):
    return {
        "program": program,
        "device": "NVIDIA X",
        "world": world,
        "median_ms": median,
        "min_ms": median - 1,
        "tokens_per_s": 81920.4,
        "peak_bytes": 3 << 29,
    }


class GpuReport(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.work = os.path.join(self.folder, "work")
        self.files = os.path.join(self.folder, "gpu_report.files")
        os.mkdir(self.work)
        self.events = []

    def write(self, name, text):
        with open(os.path.join(self.work, name), "w") as file:
            file.write(text)

    def target(self, label, status, xml):
        """A test that ran, with its folder as Bazel lays it out; returns its folder of outputs."""
        logs = os.path.join(self.folder, "testlogs", label.strip("/").replace(":", "/"))
        os.makedirs(os.path.join(logs, "test.outputs"))
        path = os.path.join(logs, "test.xml")
        with open(path, "w") as file:
            file.write(xml)
        configured = {"targetKind": "cc_test rule", "testSize": "MEDIUM"}
        self.events.append({"id": {"targetConfigured": {"label": label}}, "configured": configured})
        result = {"status": status, "testActionOutput": [{"name": "test.xml", "uri": "file://" + path}]}
        self.events.append({"id": {"testResult": {"label": label}}, "testResult": result})
        return os.path.join(logs, "test.outputs")

    def report(self, exit_code=0):
        self.write("events.json", "\n".join(json.dumps(event) for event in self.events))
        lines, good = gpu_report.report(self.work, exit_code, self.files)
        return "\n".join(lines), good

    # A failure would pass for success, or its reason would break the table.
    def test_each_case_is_a_row_with_its_reason(self):
        self.target("//gpu:memory", "FAILED", CASES)
        self.target("//gpu:suite", "PASSED", PASSED)
        text, good = self.report(exit_code=3)
        self.assertFalse(good)
        self.assertIn("2 passed, 2 failed, 1 skipped", text)
        self.assertIn("| //gpu:memory | Memory.Forward | failed | peak 2 \\| bound 1 more | 0.5 |", text)
        self.assertLess(len(text), 2000)
        self.assertIn("| Memory.TwoGpus | skipped | needs two GPUs, there is 1 | 0 |", text)
        self.assertIn("| //gpu:suite | A | passed |  |  |", text)

    # A crash, or a test that no longer compiles, would just be missing.
    def test_what_has_no_failed_case_of_its_own_fails_too(self):
        self.target("//gpu:crash", "FAILED", "")
        self.target("//gpu:late", "TIMEOUT", PASSED)
        configured = {"targetKind": "cc_test rule", "testSize": "MEDIUM"}
        broken = {"targetConfigured": {"label": "//gpu:broken"}}
        self.events.append({"id": broken, "configured": configured})
        text, good = self.report(exit_code=1)
        self.assertFalse(good)
        self.assertIn("1 passed, 3 failed, 0 skipped", text)
        self.assertIn("| //gpu:crash |  | failed | the test ended with status FAILED |", text)
        self.assertIn("| //gpu:late |  | failed | the test ended with status TIMEOUT |", text)
        self.assertIn("| //gpu:broken |  | failed | not run: its build failed |", text)

    # A run in which nothing ran would count as one in which nothing failed.
    def test_no_tests_is_no_success(self):
        text, good = self.report(exit_code=0)
        self.assertFalse(good)
        self.assertIn("0 passed, 0 failed, 0 skipped", text)
        self.target("//gpu:suite", "PASSED", PASSED)
        self.assertTrue(self.report(exit_code=0)[1])
        text, good = self.report(exit_code=8)
        self.assertFalse(good)
        self.assertIn("`bazel test` ended with exit code 8.", text)

    # Figures would be lost, or stand for other phases.
    def test_memory_and_other_figures(self):
        self.target("//gpu:memory", "FAILED", CASES)
        text, _ = self.report()
        self.assertIn("| Memory.Backward | backward | 100.0 | 200.0 | 50 % |", text)
        self.assertIn("| Memory.Backward | gathers overlapped | 11 of 12 |", text)

    # The ratio would be of runs on other numbers of GPUs, or the wrong way round.
    def test_timings_beside_pythons_of_as_many_gpus(self):
        self.target("//gpu:suite", "PASSED", PASSED)
        self.write("ppfsdp_1.json", json.dumps(timing("ppfsdp", 1, 90)) + "\n")
        self.write("ppfsdp_8.json", json.dumps(timing("ppfsdp", 8, 120)))
        self.write("python_1.json", "a warning\n" + json.dumps(timing("Python FSDP2", 1, 100)))
        self.write("python_8.error", "no module named torch\n")
        text, good = self.report()
        self.assertTrue(good)
        self.assertIn("| ppfsdp_1 | ppfsdp | 1 | 90.00 | 89.00 | 81920 | 1.50 | 0.900 |", text)
        self.assertIn("| ppfsdp_8 | ppfsdp | 8 | 120.00 | 119.00 | 81920 | 1.50 |  |", text)
        self.assertIn("| python_1 | Python FSDP2 | 1 | 100.00 | 99.00 | 81920 | 1.50 | 1.000 |", text)
        self.assertIn("python_8: no module named torch", text)

    # Without a time of ours the report would still say that all went well.
    def test_a_run_of_ours_that_failed_is_a_failure(self):
        self.target("//gpu:suite", "PASSED", PASSED)
        self.write("ppfsdp_1.json", "")
        self.write("ppfsdp_1.error", "ppfsdp: error: out of memory\n")
        text, good = self.report()
        self.assertFalse(good)
        self.assertIn("ppfsdp_1: ppfsdp: error: out of memory", text)

    # The trace would be where the next run of the tests removes it.
    def test_traces_are_kept_beside_the_report(self):
        outputs = self.target("//gpu:overlap", "PASSED", PASSED)
        with open(os.path.join(outputs, "plain.json"), "w") as file:
            file.write("{}")
        with zipfile.ZipFile(os.path.join(outputs, "outputs.zip"), "w") as archive:
            archive.writestr("packed.json", "[]")
        text, _ = self.report()
        for name, content in (("plain.json", "{}"), ("packed.json", "[]")):
            path = os.path.join(self.files, "overlap", name)
            self.assertIn("- `%s`" % path, text)
            with open(path) as file:
                self.assertEqual(file.read(), content)

    def test_the_machine(self):
        self.write("machine.txt", "GPU 0: NVIDIA X\n\ndriver 580.1\n")
        text, _ = self.report()
        self.assertIn("## Machine\n\n- GPU 0: NVIDIA X\n- driver 580.1\n", text)


if __name__ == "__main__":
    unittest.main()
