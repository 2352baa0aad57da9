#!/usr/bin/env python3
"""The README's program is the one that example_test compiles and runs."""
import re
import unittest


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


class ReadmeTest(unittest.TestCase):

    def test_the_program_is_the_tested_one(self):
        blocks = re.findall(r"^```cpp\n(.*?)^```$", read("README.md"), re.M | re.S)
        programs = [block for block in blocks if "#include" in block]
        self.assertEqual(len(programs), 1, "README.md must show one whole C++ program")
        self.maxDiff = None
        self.assertMultiLineEqual(programs[0], read("proptests/example_test.cc"))


if __name__ == "__main__":
    unittest.main()
