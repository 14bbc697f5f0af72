# SPDX-License-Identifier: GPL-2.0-or-later
"""compare.py OWN OUTSOURCED KNOWN: outputs of `python -m test -v`; says what passed on the one and not on the other. KNOWN: lines
that begin with a test's name as the output has it, and go on with the reason why it differs."""
import re
import sys


def results(path):
    text = open(path, errors="replace").read()
    return dict(re.findall(r"^(test\w+ \([\w.]+\)).*?\.\.\. (ok|FAIL|ERROR|skipped)", text, re.M | re.S))


own, outsourced = results(sys.argv[1]), results(sys.argv[2])
passed = [test for test, result in own.items() if result == "ok"]
known = [line for line in open(sys.argv[3]) if line.strip() and not line.startswith("#")]
differ = [(test, outsourced.get(test, "missing")) for test in passed if outsourced.get(test) != "ok"]
print(f"{len(passed)} pass on the guest's own stack, {len(passed) - len(differ)} of them outsourced")
unknown = [(test, result) for test, result in differ if not any(line.startswith(test.split(" ")[0]) for line in known)]
for test, result in differ:
    print(f"{'' if (test, result) in unknown else 'known, '}{result}: {test}")
sys.exit(bool(unknown) or not passed)
