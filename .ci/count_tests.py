"""Counts the test cases of `bazel test` runs and prints one closing line: N passed, N failed.

Usage: count_tests.py (NAME EVENTS EXIT_CODE)... For each run, NAME stands before what it reports,
EVENTS is what --build_event_json_file wrote, EXIT_CODE what Bazel ended with. Cases are those of
each target's test.xml, cached results included. A target that failed without a failed case (a
crash, a time-out, no XML) or that was not built counts as one failed case, and a run that failed
otherwise (a build file that cannot be read, no events at all) as one more. Tests that the build
leaves out, and tests for a GPU that were only built, count as nothing. Targets that failed are
named above the closing line. Exit code 1 when anything failed.
"""

import json
import sys
import urllib.parse
import xml.etree.ElementTree


def cases_of(path):
    """(passed, failed, skipped) of one test.xml; none of each when it cannot be read."""
    passed = failed = skipped = 0
    try:
        root = xml.etree.ElementTree.parse(path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return 0, 0, 0
    for case in root.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif case.find("skipped") is not None:
            skipped += 1
        elif case.get("status") != "notrun":  # Google Test's word for a disabled test.
            passed += 1
    return passed, failed, skipped


def read_events(lines):
    """({target: {shard: (status, path of test.xml)}}, test targets that lack a result)."""
    results, expected, for_gpu, may_lack = {}, set(), set(), set()
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue  # Bazel was ended while it wrote this line.
        identity = event.get("id", {})
        if "targetConfigured" in identity and "testSize" in event.get("configured", {}):
            label = identity["targetConfigured"]["label"]
            expected.add(label)
            if "gpu" in event["configured"].get("tag", []):
                for_gpu.add(label)
        if "targetCompleted" in identity:
            label = identity["targetCompleted"]["label"]
            built = event.get("completed", {}).get("success", False)
            if (built and label in for_gpu) or event.get("aborted", {}).get("reason") == "SKIPPED":
                may_lack.add(label)
        if "testResult" in identity and "testResult" in event:
            of = identity["testResult"]
            outputs = event["testResult"].get("testActionOutput", [])
            uris = [output.get("uri", "") for output in outputs if output["name"] == "test.xml"]
            path = urllib.parse.unquote(urllib.parse.urlparse(uris[0]).path) if uris else ""
            # Attempts of one shard follow each other; the last one decides.
            shards = results.setdefault(of["label"], {})
            shards[of.get("run", 1), of.get("shard", 1)] = (event["testResult"]["status"], path)
    return results, sorted(expected - may_lack - set(results))


def count(lines, exit_code):
    """((passed, failed, skipped), what went wrong, one line a target)."""
    results, not_run = read_events(lines)
    total = [0, 0, 0]
    wrong = []
    for label, shards in sorted(results.items()):
        for status, path in shards.values():
            passed, failed, skipped = cases_of(path)
            if status != "PASSED":
                wrong.append("%s: %s" % (label, status))
                failed = max(failed, 1)
            elif passed + failed + skipped == 0:
                passed = 1
            total = [a + b for a, b in zip(total, (passed, failed, skipped))]
    wrong += ["%s: not run, its build failed" % label for label in not_run]
    total[1] += len(not_run)
    if exit_code != 0 and total[1] == 0:
        wrong.append("bazel ended with exit code %d" % exit_code)
        total[1] = 1
    return total, wrong


def count_runs(runs):
    """(passed, failed, skipped) over `runs`, each (name, path of events, exit code), and faults."""
    total, wrong = [0, 0, 0], []
    for name, path, exit_code in runs:
        try:
            with open(path) as events:
                cases, of_run = count(events, int(exit_code))
        except OSError:
            cases, of_run = count([], int(exit_code) or 1)
        total = [a + b for a, b in zip(total, cases)]
        wrong += ["%s: %s" % (name, line) for line in of_run]
    return total, wrong


def main():
    arguments = sys.argv[1:]
    (passed, failed, skipped), wrong = count_runs(zip(*(arguments[i::3] for i in range(3))))
    for line in wrong:
        print(line)
    print("%d passed, %d failed%s" % (passed, failed, ", %d skipped" % skipped if skipped else ""))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
