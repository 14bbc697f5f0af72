# SPDX-License-Identifier: GPL-2.0-or-later
"""compare.py OWN OUTSOURCED KNOWN [TIMED]: outputs of `python -m test -v`; says what passed on the one and not on the other.

KNOWN: lines that begin with a test's name as the output has it, and go on with the reason why it differs. TIMED: a file of the
same form, of tests that the kernel is too slow for. Their results are named and do not count."""
import re
import sys


def results(path):
    text = open(path, errors="replace").read()
    return dict(re.findall(r"^(test\w+ \([\w.]+\)).*?\.\.\. (ok|FAIL|ERROR|skipped)", text, re.M | re.S))


def listed(path):
    """The lines of a file that name a test."""
    with open(path) as file:
        return [line for line in file if line.strip() and not line.startswith("#")]


def named(test, lines):
    return any(line.startswith(test) for line in lines)


own, outsourced = results(sys.argv[1]), results(sys.argv[2])
known, timed = listed(sys.argv[3]), sum(map(listed, sys.argv[4:]), [])
for test in [test for test in {**own, **outsourced} if named(test, timed)]:
    print(f"not compared, as the kernel is slow: {test}: own {own.pop(test, 'missing')}, "
          f"outsourced {outsourced.pop(test, 'missing')}")
passed = [test for test, result in own.items() if result == "ok"]
differ = [(test, outsourced.get(test, "missing")) for test in passed if outsourced.get(test) != "ok"]
print(f"{len(passed)} pass on the guest's own stack, {len(passed) - len(differ)} of them outsourced")
unknown = [(test, result) for test, result in differ if not named(test, known)]
for test, result in differ:
    print(f"{'' if (test, result) in unknown else 'known, '}{result}: {test}")
sys.exit(bool(unknown) or not passed)
