"""Writes the report of .ci/gpu: what ran on this machine's GPUs, and how it went.

Usage: gpu_report.py WORK EXIT_CODE REPORT. EXIT_CODE is what `bazel test` ended with; the folder
WORK holds, as far as they came to be,

  machine.txt        lines that describe the machine
  events.json        what --build_event_json_file wrote
  NAME.json          one line of JSON of a timed run: its program, device, world, median_ms, ...
  NAME.error         why the timed run NAME has no such line

REPORT is Markdown. What the tests wrote to their output folders (traces) goes to a folder beside it,
whose name is the report's with .files for its ending. Exit code 1 when a test failed, when none ran,
or when a run of ours could not be timed.
"""

import json
import os
import shutil
import sys
import xml.etree.ElementTree
import zipfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import count_tests

MIB = 1 << 20
# Characters of a reason: LibTorch's have a stack trace behind them.
MOST = 400


def cell(text):
    """`text` as it may stand in a table: one line, without the table's own marks."""
    return " ".join(str(text).split()).replace("|", "\\|")


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return lines + ["| " + " | ".join(cell(field) for field in row) + " |" for row in rows]


def read_cases(path):
    """[(name, "passed"/"failed"/"skipped", why, seconds, {property: value})] of one test.xml."""
    cases = []
    for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase"):
        if case.get("status") == "notrun":
            continue
        name = case.get("name", "")
        if case.get("classname"):
            name = case.get("classname") + "." + name
        result, why = "passed", ""
        for tag, meaning in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            found = case.find(tag)
            if found is not None:
                result, why = meaning, (found.get("message") or found.text or "")[:MOST]
        properties = {p.get("name"): p.get("value") for p in case.iter("property")}
        cases.append((name, result, why, case.get("time", ""), properties))
    return cases


def read_tests(events):
    """[(target, case, result, why, seconds, properties)] and the targets' output folders."""
    results, not_run = count_tests.read_events(events)
    rows, outputs = [], []
    for label, shards in sorted(results.items()):
        for status, path in shards.values():
            try:
                cases = read_cases(path)
            except (OSError, xml.etree.ElementTree.ParseError):
                cases = []
            failed = any(result == "failed" for _, result, *_ in cases)
            if status != "PASSED" and not failed:
                cases.append(("", "failed", "the test ended with status " + status, "", {}))
            rows += [(label,) + case for case in cases]
            outputs.append((label, os.path.join(os.path.dirname(path), "test.outputs")))
    rows += [(label, "", "failed", "not run: its build failed", "", {}) for label in not_run]
    return rows, outputs


def keep_outputs(outputs, folder):
    """Copies the files of the tests' output folders to `folder`; returns where they are now."""
    kept = []
    for label, source in outputs:
        if not os.path.isdir(source):
            continue
        target = os.path.join(folder, label.rpartition(":")[2])
        for name in sorted(os.listdir(source)):
            os.makedirs(target, exist_ok=True)
            path = os.path.join(source, name)
            if name == "outputs.zip":
                with zipfile.ZipFile(path) as archive:
                    archive.extractall(target)
                    kept += [os.path.join(target, each) for each in archive.namelist()]
            elif os.path.isfile(path):
                shutil.copy(path, target)
                kept.append(os.path.join(target, name))
    return sorted(set(kept))


def machine_section(work):
    try:
        with open(os.path.join(work, "machine.txt")) as file:
            lines = [line.rstrip() for line in file if line.strip()]
    except OSError:
        lines = ["unknown"]
    return ["## Machine", ""] + ["- " + line for line in lines] + [""]


def tests_section(rows):
    counts = {result: 0 for result in ("passed", "failed", "skipped")}
    for row in rows:
        counts[row[2]] += 1
    summary = ", ".join("%d %s" % (counts[result], result) for result in counts)
    lines = ["## Tests", "", summary, ""]
    shown = [(label, name, result, why, seconds) for label, name, result, why, seconds, _ in rows]
    return lines + table(("target", "case", "result", "why", "s"), shown) + [""]


def memory_section(rows):
    """Of the properties X_peak and X_bound, in bytes."""
    found = []
    for _, name, _, _, _, properties in rows:
        for key, peak in properties.items():
            what = key[: -len("_peak")]
            if not key.endswith("_peak") or what + "_bound" not in properties:
                continue
            peak, bound = int(peak), int(properties[what + "_bound"])
            share = "%.0f %%" % (100.0 * peak / bound) if bound else ""
            found.append((name, what, "%.1f" % (peak / MIB), "%.1f" % (bound / MIB), share))
    lines = ["## Peak memory and its bounds", ""]
    if not found:
        return lines + ["Not measured.", ""]
    return lines + table(("case", "phase", "peak MiB", "bound MiB", "of it"), found) + [""]


def figures_section(rows):
    """What else the tests measured."""
    found = []
    for _, name, _, _, _, properties in rows:
        for key, value in properties.items():
            if not key.endswith(("_peak", "_bound")):
                found.append((name, key.replace("_", " "), value))
    if not found:
        return []
    return ["## Other figures", ""] + table(("case", "figure", "value"), found) + [""]


def read_timings(work):
    """({name: result}, {name: why there is none})."""
    results, errors = {}, {}
    for file in sorted(os.listdir(work)):
        name, ending = os.path.splitext(file)
        if ending not in (".json", ".error") or name == "events":
            continue
        with open(os.path.join(work, file)) as text:
            content = text.read().strip()
        try:
            if ending == ".json":
                results[name] = json.loads(content.splitlines()[-1])
            else:
                errors[name] = content or "it failed without a word"
        except (ValueError, IndexError):
            errors.setdefault(name, "it printed no JSON")
    return {name: result for name, result in results.items() if name not in errors}, errors


def timing_section(results, errors):
    lines = ["## Time of a training step", ""]
    rows = []
    python = {r["world"]: r["median_ms"] for n, r in results.items() if n.startswith("python")}
    for name, result in results.items():
        beside = python.get(result["world"])
        rows.append(
            (
                name,
                result["program"],
                result["world"],
                "%.2f" % result["median_ms"],
                "%.2f" % result["min_ms"],
                "%.0f" % result["tokens_per_s"],
                "%.2f" % (result["peak_bytes"] / MIB / 1024) if result["peak_bytes"] else "",
                "%.3f" % (result["median_ms"] / beside) if beside else "",
            )
        )
    if rows:
        lines += table(
            ("run", "program", "GPUs", "median ms", "least ms", "tokens/s", "peak GiB", "of Python's time"),
            rows,
        )
        lines.append("")
    lines += ["%s: %s" % (name, cell(why)) for name, why in sorted(errors.items())]
    if not rows and not errors:
        lines.append("Not timed.")
    return lines + [""]


def report(work, exit_code, files):
    """(the report's lines, whether all went well); the tests' outputs go to the folder `files`."""
    try:
        with open(os.path.join(work, "events.json")) as events:
            rows, outputs = read_tests(events)
    except OSError:
        rows, outputs = [], []
    kept = keep_outputs(outputs, files)
    results, errors = read_timings(work)
    wrong = [row for row in rows if row[2] == "failed"]
    lines = ["# GPU report", ""] + machine_section(work) + tests_section(rows)
    if exit_code != 0 and not wrong:
        lines += ["`bazel test` ended with exit code %d." % exit_code, ""]
    lines += timing_section(results, errors) + memory_section(rows) + figures_section(rows)
    lines += ["## Traces (for ui.perfetto.dev or chrome://tracing)", ""]
    lines += ["- `%s`" % path for path in kept] or ["None."]
    ours_timed = not any(name.startswith("ppfsdp") for name in errors)
    return lines, exit_code == 0 and bool(rows) and not wrong and ours_timed


def main():
    work, exit_code, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    lines, good = report(work, exit_code, os.path.splitext(path)[0] + ".files")
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
    print("%s: %s" % (path, "all went well" if good else "something failed"))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
