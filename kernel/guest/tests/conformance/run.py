# SPDX-License-Identifier: GPL-2.0-or-later
"""In the guest: public test suites on the guest's own stack ("native") and on outsourced sockets.

    run.py SUITE OUT KNOWN [PREFIX...]

SUITE: `ci`, `default`, `all`, or names of suites separated by commas. OUT: the directory for logs and results.json. KNOWN: the
file of known differences. PREFIX: what starts the outsourced run, for example `taskset -c 0 chrt -f 40` for a channel.

Each suite runs once on each stack. The tests whose verdicts differ run AGAIN times more on each. The table counts the first
run. A test is a difference if it passed in every native run and not in every outsourced run; with `ci`, for machines that do
much else, if it passed in no outsourced run. Exit status 1: a difference that KNOWN does not explain, or a suite in which no
test passes natively.
"""
import glob
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

AGAIN = 3
# Seconds without a line of output and without use of CPU time after which a program counts as hanging; with use of CPU time,
# SPINS times as many. An emulated vCPU is slow, and slower still where the machine is busy.
PATIENCE = 60
SPINS = 20
STEER = "/sys/module/ontime/parameters/steer"
PERL = "/lab/perl"
NODE = "/lab/node/test"
RUBY = "/lab/ruby"
HERE = os.path.abspath(__file__)

# Name, kind, what is run, the smallest set that has it: `ci` is part of `default`, and that of `all`.
SETS = ["ci", "default", "all"]
SUITES = [
    ("socket", "python", "test.test_socket", "default"),
    ("asyncio-sock", "python", "test.test_asyncio.test_sock_lowlevel", "ci"),
    ("asyncio-selector", "python", "test.test_asyncio.test_selector_events", "default"),
    ("asyncio-streams", "python", "test.test_asyncio.test_streams", "default"),
    ("select", "python", "test.test_select", "ci"),
    ("selectors", "python", "test.test_selectors", "ci"),
    ("go-net", "go", "net", "default"),
    ("libuv", "libuv", "tcp udp getsockname connect accept listen ping_pong shutdown close_order poll_", "default"),
    ("node-dgram", "node", "parallel/test-dgram-*.js sequential/test-dgram-*.js", "default"),
    ("node-net", "node", "parallel/test-net-*.js sequential/test-net-*.js", "default"),
    ("ruby-socket", "ruby", "test_socket test_tcp test_udp test_basicsocket test_nonblock test_ancdata test_sockopt",
     "default"),
    ("redis-network", "redis", "unit/networking unit/protocol unit/limits unit/querybuf unit/pubsub", "default"),
    ("perl-core", "perl", "t/io/socket.t t/io/socketpair.t", "ci"),
    ("perl-io", "perl", "dist/IO/t/io_*.t dist/IO/t/cachepropagate-*.t dist/IO/t/IO.t", "default"),
    ("perl-socket", "perl", "cpan/Socket/t/*.t", "default"),
    ("perl-socket-ip", "perl", "cpan/IO-Socket-IP/t/*.t", "all"),
    ("go-http", "go", "net-http", "all"),
    ("go-rpc", "go", "net-rpc", "all"),
    ("go-smtp", "go", "net-smtp", "all"),
    ("asyncio-events", "python", "test.test_asyncio.test_events", "all"),
    ("asyncio-server", "python", "test.test_asyncio.test_server", "all"),
    ("asyncio-sendfile", "python", "test.test_asyncio.test_sendfile", "all"),
    ("asyncio-buffered", "python", "test.test_asyncio.test_buffered_proto", "all"),
    ("asyncio-base", "python", "test.test_asyncio.test_base_events", "all"),
    ("asyncio-ssl", "python", "test.test_asyncio.test_ssl", "all"),
    ("asyncio-sslproto", "python", "test.test_asyncio.test_sslproto", "all"),
    ("poll", "python", "test.test_poll", "all"),
    ("epoll", "python", "test.test_epoll", "all"),
    ("socketserver", "python", "test.test_socketserver", "all"),
    ("ssl", "python", "test.test_ssl", "all"),
    ("httplib", "python", "test.test_httplib", "all"),
    ("httpservers", "python", "test.test_httpservers", "all"),
    ("ftplib", "python", "test.test_ftplib", "all"),
    ("smtplib", "python", "test.test_smtplib", "all"),
    ("poplib", "python", "test.test_poplib", "all"),
    ("imaplib", "python", "test.test_imaplib", "all"),
    ("urllib", "python", "test.test_urllib2_localnet", "all"),
    ("xmlrpc", "python", "test.test_xmlrpc", "all"),
]


# ---- In a process of its own: the tests of one Python module ----

def python_child(module, pipe):
    """Runs tests of a module; the names on standard input, if any. Each event is a line of JSON on @pipe."""
    import faulthandler
    import traceback
    import unittest
    from test import support

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # It calls its local servers a network; what others call one is the Internet.
    support.use_resources = ["network"] if module == "test.test_socketserver" else []
    out = os.fdopen(pipe, "w", buffering=1)

    def tell(event, test, line=""):
        out.write(json.dumps([event, test.id(), line]) + "\n")

    def last_line(err):
        # The whole of it is for the log.
        traceback.print_exception(*err)
        lines = str(err[1]).strip().splitlines() or [""]
        return f"{err[0].__name__}: {lines[0]}"

    class Result(unittest.TestResult):
        def startTest(self, test):
            super().startTest(test)
            self.bad = False
            tell("start", test)

        def addSuccess(self, test):
            super().addSuccess(test)
            if not self.bad:
                tell("ok", test)

        def addError(self, test, err):
            super().addError(test, err)
            tell("error", test, last_line(err))

        def addFailure(self, test, err):
            super().addFailure(test, err)
            tell("fail", test, last_line(err))

        def addSkip(self, test, reason):
            super().addSkip(test, reason)
            tell("skipped", test, reason)

        def addExpectedFailure(self, test, err):
            super().addExpectedFailure(test, err)
            tell("expected failure", test)

        def addUnexpectedSuccess(self, test):
            super().addUnexpectedSuccess(test)
            tell("unexpected success", test)

        def addSubTest(self, test, subtest, err):
            super().addSubTest(test, subtest, err)
            if err is not None:
                self.bad = True
                tell("fail", test, last_line(err))

    def flat(suite):
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                yield from flat(test)
            else:
                yield test

    def chosen(test):
        # "setUpClass (CLASS)" is the fixture of all its tests.
        fixture = f"({test.id().rpartition('.')[0]})"
        return not wanted or any(name == test.id() or name.endswith(fixture) for name in wanted)

    wanted = [name for name in sys.stdin.read().split("\n") if name]
    tests = list(flat(unittest.defaultTestLoader.loadTestsFromName(module)))
    out.write(json.dumps(["list", module, [test.id() for test in tests]]) + "\n")
    unittest.TestSuite(test for test in tests if chosen(test)).run(Result())
    out.write(json.dumps(["end", module, ""]) + "\n")
    out.flush()
    # Threads that a test left behind are not waited for.
    os._exit(0)


# ---- The runs ----

def where(pid):
    """Where in the kernel the threads of a process wait."""
    places = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{task}/wchan") as file:
                places.add(file.read().strip("0"))
        except OSError:
            pass
    return " ".join(sorted(places - {""}))


def cpu_time(session):
    """Clock ticks that the processes of a session have used."""
    used = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            used += sum(map(int, fields[11:15]))
    return used


def silent(pipe, session):
    """Waits for output; True where the processes of a session hang."""
    used = cpu_time(session)
    for _ in range(SPINS):
        if select.select([pipe], [], [], PATIENCE)[0]:
            return False
        before, used = used, cpu_time(session)
        if used - before < os.sysconf("SC_CLK_TCK") // 10:
            return True
    return True


def lines_of(pipe, session):
    """What a session writes, line by line; None where it hangs."""
    rest = b""
    while True:
        if silent(pipe, session):
            yield None
            return
        data = os.read(pipe, 65536)
        if not data:
            if rest:
                yield rest
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def python_once(module, names, log, prefix, results):
    """One process; False if it did not come to its end: then the last test that it began has that verdict."""
    read, write = os.pipe()
    command = [*prefix, sys.executable, HERE, "child", module, str(write)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write], start_new_session=True,
                               cwd="/tmp")
    os.close(write)
    process.stdin.write("\n".join(names).encode())
    process.stdin.close()
    current, every, verdict, ended = None, [], None, False
    for line in lines_of(read, process.pid):
        if line is None:
            verdict = ("hangs", where(process.pid))
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            break
        event, test, text = json.loads(line)
        if event == "list":
            every = text
        elif event == "end":
            ended = True
            break
        elif event == "start":
            current = test
        # The first word about a test that is not good stays: its tear-down fails, too.
        elif results.get(test, ("ok", ""))[0] in ("ok", "hangs", "dies"):
            results[test] = (event, text)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    status = process.wait()
    os.close(read)
    if not ended and current is not None:
        results[current] = verdict or ("dies", f"status {status}")
    elif not ended:
        results[f"{module} (as a whole)"] = verdict or ("dies", f"status {status}, before the first test")
        return every, True
    return every, ended


def python_run(module, names, log, prefix):
    results, todo = {}, names
    while True:
        every, ended = python_once(module, todo, log, prefix, results)
        # What a fixture of its class skipped has no verdict of its own.
        todo = [test for test in names or every if test not in results]
        if ended or not todo:
            return results


TAP = re.compile(r"^(not )?ok\b *(\d*)[ -]*(.*)")


def tap(output):
    """Verdicts of one file's output: number and description -> (verdict, error line)."""
    results, last, planned, count = {}, None, None, 0
    for line in output.splitlines():
        if match := re.match(r"1\.\.(\d+)(?: *# *skip\S* *(.*))?", line, re.I):
            planned = int(match[1])
            if planned == 0:
                return {"whole": ("skipped", match[2] or "")}
        elif match := TAP.match(line):
            count += 1
            text, note = (part.strip() for part in match[3].partition("#")[::2])
            verdict = "fail" if match[1] else "ok"
            if note.lower().startswith("skip"):
                verdict = "skipped"
            elif note.lower().startswith("todo"):
                verdict = "expected failure"
            # Port numbers and the like are others each time.
            last = f"{match[2] or count} {re.sub(r'[0-9]{3,}', 'N', text)}".strip()
            results[last] = (verdict, note)
        elif line.startswith("#") and last and results[last][0] == "fail" and not results[last][1]:
            results[last] = ("fail", line.lstrip("# "))
    results["whole"] = ("ok", "") if count == planned else ("fail", f"{count} tests of {planned}")
    return results


def output_of(command, cwd, environment):
    """What a program writes, and (verdict, line) where it does not end by itself with status 0."""
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    output, verdict = [], None
    for line in lines_of(process.stdout.fileno(), process.pid):
        if line is None:
            verdict = ("hangs", where(process.pid))
            break
        output.append(line.decode(errors="replace"))
    if verdict:
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    process.stdout.close()
    return "\n".join(output), verdict or (("dies", f"status {status}") if status else None)


def perl_run(patterns, names, log, prefix):
    results = {}
    for path in sorted(sum((glob.glob(f"{PERL}/{pattern}") for pattern in patterns.split()), [])):
        file = os.path.relpath(path, PERL)
        if names and not any(name.startswith(f"{file} ") for name in names):
            continue
        # Those of the core run in t, the modules' in their own directory.
        cwd = f"{PERL}/t" if file.startswith("t/") else os.path.dirname(os.path.dirname(path))
        text, verdict = output_of([*prefix, "perl", path], cwd, os.environ)
        log.write(f"== {file}\n{text}")
        found = tap(text)
        # A status says nothing new where a test failed.
        if verdict and (verdict[0] == "hangs" or all(value[0] != "fail" for value in found.values())):
            found["whole"] = verdict
        results.update({f"{file} {name}": verdict for name, verdict in found.items()})
    if names:
        results = {name: verdict for name, verdict in results.items() if name in names}
    return results


GO = re.compile(r" *--- (PASS|FAIL|SKIP): (\S+) \(")
GO_VERDICTS = {"PASS": "ok", "FAIL": "fail", "SKIP": "skipped"}


def go_once(package, choice, log, prefix, results):
    """One process. False if it did not come to its end: then the tests that it had begun have that verdict."""
    command = [*prefix, f"/lab/go/{package}.test", "-test.v", "-test.short", *choice]
    process = subprocess.Popen(command, cwd=f"/lab/go/{package}", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    begun, text, verdict, ended, known = [], "", None, False, len(results)
    for line in lines_of(process.stdout.fileno(), process.pid):
        if line is None:
            verdict = ("hangs", where(process.pid))
            process.send_signal(signal.SIGQUIT)
            time.sleep(1)
            break
        line = line.decode(errors="replace")
        log.write(line + "\n")
        ended = ended or line in ("PASS", "FAIL")
        if match := re.match(r"=== RUN +([^/\s]+)$", line):
            begun.append(match[1])
        elif match := GO.match(line):
            results[match[2]] = (GO_VERDICTS[match[1]], text)
        elif match := re.match(r" +(\w+\.go:\d+: .*)", line):
            text = match[1]
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    status = process.wait()
    log.write(process.stdout.read().decode(errors="replace"))
    open_tests = [test for test in begun if test not in results]
    for test in open_tests:
        results[test] = verdict or ("dies", f"status {status}")
    return ended or len(results) == known


def go_run(package, names, log, prefix):
    results = {}
    tops = sorted({name.split("/")[0] for name in names})
    choice = ["-test.run", f"^({'|'.join(tops)})$"] if tops else []
    ended = False
    while not ended:
        over = "|".join(test for test in results if "/" not in test)
        ended = go_once(package, [*choice, *(["-test.skip", f"^({over})$"] if over else [])], log, prefix, results)
    return {name: verdict for name, verdict in results.items() if not names or name in names}


def libuv_run(words, names, log, prefix):
    """Each test of libuv is a process of its own, and says so in TAP."""
    results = {}
    environment = {**os.environ, "UV_RUN_AS_ROOT": "1", "UV_TEST_TIMEOUT_MULTIPLIER": "10"}
    listed = subprocess.check_output(["./uv_run_tests_a", "--list"], cwd="/lab/libuv", env=environment, text=True)
    # "ping_pong (helpers: tcp4_echo_server)"
    every = sorted({line.split()[0] for line in listed.splitlines() if re.match(r"\w", line)})
    for name in names or [name for name in every if any(word in name for word in words.split())]:
        output, verdict = output_of([*prefix, "./uv_run_tests_a", name], "/lab/libuv", environment)
        log.write(f"== {name}\n{output}")
        if verdict is None or verdict[0] == "dies":
            found = tap(output)
            # One test has no plan, against which its number could be checked.
            if found["whole"][0] == "fail" and not re.search(r"^1\.\.", output, re.M):
                del found["whole"]
            bad = [value for value in found.values() if value[0] not in ("ok", "skipped")]
            # What the test itself said is the line after the heading of its output.
            said = re.findall(r"^# (?!exit code|Output from)(.+)", output, re.M)
            if bad or verdict is None:
                verdict = (bad[0][0], said[0] if said else bad[0][1]) if bad else \
                    next(iter(found.values()), ("dies", "no verdict"))
        results[name] = verdict
    return results


def node_run(patterns, names, log, prefix):
    """Each file of Node's is a test, which ends with status 0 if it passes."""
    results = {}
    for path in sorted(sum((glob.glob(f"{NODE}/{pattern}") for pattern in patterns.split()), [])):
        name = f"node {os.path.relpath(path, NODE)}"
        if names and name not in names:
            continue
        # Without the flags that a file names it would start itself once more.
        with open(path) as file:
            flags = re.search(r"^// Flags: (--.*)", file.read(1500), re.M)
        output, verdict = output_of([*prefix, "node", *(flags[1].split() if flags else []), path], NODE, os.environ)
        log.write(f"== {name}\n{output}\n")
        if verdict is None:
            skipped = re.search(r"^1\.\.0 # Skipped: (.*)", output, re.M)
            verdict = ("skipped", skipped[1]) if skipped else ("ok", "")
        elif verdict[0] == "dies":
            said = re.search(r"^(\w*Error\b.*|Mismatched .*)", output, re.M)
            verdict = ("fail", said[1] if said else verdict[1])
        results[name] = verdict
    return results


RUBY_SUM = re.compile(r"^(\d+) tests?, \d+ assertions?, (\d+) failures?, (\d+) errors?, (\d+) skips?", re.M)


def ruby_run(files, names, log, prefix):
    """Each test of Ruby's is a process of its own, by the test library of the same source."""
    results = {}
    environment = {**os.environ, "RUBY_TEST_TIMEOUT_SCALE": "10"}
    for file in files.split():
        with open(f"{RUBY}/test/socket/{file}.rb") as source:
            tests = dict.fromkeys(re.findall(r"^ *def (test_\w+[?!]?)", source.read(), re.M))
        for test in tests:
            name = f"ruby {file} {test}"
            if names and name not in names:
                continue
            choice = ["-n", f"/(\\A|#){re.escape(test)}\\z/"]
            output, verdict = output_of([*prefix, "ruby", "-W0", "-Itool/lib", "-rtest/unit", f"test/socket/{file}.rb",
                                         *choice], RUBY, environment)
            log.write(f"== {name}\n{output}\n")
            found = RUBY_SUM.search(output)
            if found and (verdict is None or verdict[0] == "dies"):
                count, failures, errors, skips = map(int, found.groups())
                said = re.search(r"^ *\d+\) (?:Failure|Error):\n.*\n(.*)", output, re.M)
                if failures + errors:
                    verdict = ("fail", said[1] if said else "")
                else:
                    # A test is left out where the machine lacks what it needs.
                    verdict = ("skipped", "") if skips or not count else ("ok", "")
            results[name] = verdict or ("fail", "no result")
    return results


REDIS = re.compile(r"\[(ok|err|timeout|skip|ignore)\]: (.*?)(?: in tests/\S+)?(?: \(\d+ ms\))?$")
REDIS_VERDICTS = {"ok": "ok", "err": "fail", "timeout": "hangs", "skip": "skipped", "ignore": "skipped"}


def redis_run(units, names, log, prefix):
    """Each unit of Redis' is a process, which starts servers and is their client."""
    results = {}
    for unit in units.split():
        if names and not any(name.startswith(f"{unit} ") for name in names):
            continue
        command = ["tclsh", "tests/test_helper.tcl", "--single", unit, "--clients", "1", "--no-latency", "--tags",
                   "-slow -large-memory"]
        # A terminal would get colours.
        output, verdict = output_of([*prefix, *command], "/lab/redis", {**os.environ, "TERM": "dumb"})
        log.write(f"== {unit}\n{output}\n")
        found, last = {}, None
        for line in output.splitlines():
            if match := REDIS.match(line):
                # Port numbers and the like are others each time.
                last = f"{unit} {re.sub(r'[0-9]{3,}', 'N', match[2])}"
                if found.get(last, ("ok", ""))[0] == "ok":
                    found[last] = (REDIS_VERDICTS[match[1]], "")
            elif last and found[last] == ("fail", ""):
                found[last] = ("fail", line.strip())
        # A status says nothing new where a test failed.
        if verdict is None or (verdict[0] == "dies" and any(value[0] == "fail" for value in found.values())):
            verdict = ("ok", "")
        results.update(found)
        results[f"{unit} whole"] = verdict
    if names:
        results = {name: verdict for name, verdict in results.items() if name in names}
    return results


RUNS = {"python": python_run, "perl": perl_run, "go": go_run, "libuv": libuv_run, "node": node_run, "ruby": ruby_run,
        "redis": redis_run}


def run(suite, stack, names, out, prefix):
    name, kind, what, _ = suite
    with open(STEER, "w") as file:
        file.write("none" if stack == "native" else "all")
    before = time.monotonic()
    with open(f"{out}/{name}-{stack}.log", "a") as log:
        results = RUNS[kind](what, names, log, prefix if stack == "outsourced" else [])
    seconds = time.monotonic() - before
    with open("/dev/console", "w") as console:
        console.write(f"conformance: {name} {stack}: {passes(results)} of {len(results)}, {seconds:.0f} s\n")
    return results


# ---- The table ----

def passes(results):
    return sum(verdict == "ok" for verdict, _ in results.values())


def good(verdict):
    return verdict in ("ok", "expected failure")


def compare(native, outsourced):
    """Names of tests that have another verdict. Both skip, or both fail: nothing differs."""
    return [test for test in {**native, **outsourced}
            if native.get(test, ("missing",))[0] != outsourced.get(test, ("missing",))[0]]


def known_differences(path):
    known = {}
    for line in open(path):
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.partition(" | ")
            known[name.strip()] = reason.strip()
    return known


def suite_result(suite, out, prefix):
    stacks = ("native", "outsourced")
    runs = {stack: [run(suite, stack, [], out, prefix)] for stack in stacks}
    differ = compare(runs["native"][0], runs["outsourced"][0])
    if differ:
        for _ in range(AGAIN):
            for stack in stacks:
                runs[stack].append(run(suite, stack, differ, out, prefix))
    found = {}
    for test in differ:
        verdicts = {stack: [results.get(test, ("missing", "")) for results in runs[stack]] for stack in stacks}
        bad = [text for verdict, text in verdicts["outsourced"] if not good(verdict)]
        found[test] = {
            "native": [verdict for verdict, _ in verdicts["native"]],
            "outsourced": [verdict for verdict, _ in verdicts["outsourced"]],
            "line": bad[0] if bad else next((text for verdict, text in verdicts["native"] if not good(verdict)), ""),
            # Where the own stack fails at times there is nothing to compare with.
            "counts": all(good(verdict) for verdict, _ in verdicts["native"]) and bool(bad),
            "always": len(bad) == len(runs["outsourced"]),
        }
    first = {stack: runs[stack][0] for stack in stacks}
    return {"tests": len(first["native"]), "native": passes(first["native"]), "outsourced": passes(first["outsourced"]),
            "differ": found, "verdicts": first}


def often(verdicts):
    return ", ".join(f"{verdict} {verdicts.count(verdict)}" for verdict in dict.fromkeys(verdicts))


def show(results, known, busy):
    print(f"{'suite':18} {'tests':>6} {'native passes':>14} {'outsourced passes':>18} {'differences':>12}")
    total = [0, 0, 0, 0]
    for name, result in results.items():
        counted = sum(difference["counts"] for difference in result["differ"].values())
        row = [result["tests"], result["native"], result["outsourced"], counted]
        total = [a + b for a, b in zip(total, row)]
        print(f"{name:18} {row[0]:6} {row[1]:14} {row[2]:18} {row[3]:12}")
    print(f"{'total':18} {total[0]:6} {total[1]:14} {total[2]:18} {total[3]:12}")
    unexplained = 0
    for result in results.values():
        for test, difference in result["differ"].items():
            kind = "not steady natively" if not difference["counts"] else "known" if test in known else \
                   "at times" if busy and not difference["always"] else "DIFFERENCE"
            unexplained += kind == "DIFFERENCE"
            print(f"{kind}: {test}: native {often(difference['native'])}; "
                  f"outsourced {often(difference['outsourced'])}: {difference['line']}")
            if kind == "known":
                print(f"    {known[test]}")
    ran = set().union(*(result["verdicts"]["native"] for result in results.values()))
    differ = {test for result in results.values() for test, found in result["differ"].items() if found["counts"]}
    for test in known:
        if test in ran - differ:
            print(f"no longer a difference: {test}")
    print(f"{unexplained} differences without a reason")
    return unexplained


def main():
    wanted, out, known_file, *prefix = sys.argv[1:]
    chosen = [suite for suite in SUITES
              if suite[0] in wanted.split(",") or wanted in SETS[SETS.index(suite[3]):]]
    for suite in [suite for suite in chosen if suite[1] != "python" and not os.path.isdir(f"/lab/{suite[1]}")]:
        print(f"left out: {suite[0]}")
        chosen.remove(suite)
    if not chosen:
        sys.exit(f"no such suite: {wanted}; there are: {' '.join(suite[0] for suite in SUITES)}")
    results = {}
    for suite in chosen:
        results[suite[0]] = suite_result(suite, out, prefix)
        with open(f"{out}/results.json", "w") as file:
            json.dump(results, file, indent=1)
    unexplained = show(results, known_differences(known_file), wanted == "ci")
    sys.exit(bool(unexplained) or any(not result["native"] for result in results.values()))


if __name__ == "__main__":
    if sys.argv[1] == "child":
        sys.path[0:1] = []
        python_child(sys.argv[2], int(sys.argv[3]))
    else:
        main()
