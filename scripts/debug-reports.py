"""Reads what the kernel of a guest reported: debug-reports.py KNOWN OUT

OUT: what the guest left (guest-test.sh): dmesg, console, console-first, and kmemleak and symbols where it has them.
KNOWN: a file of reports that have a reason, a line each: a regular expression, which a report must contain, " | ", and
the reason. Prints every other report whole, and ends with 1 if there is one, or if it cannot know: the log is missing,
or without its beginning, or not a debug kernel's. Linux has many data races (KCSAN) of its own, which any interrupt may
meet. So a race counts if one of its accesses is by a function of the repository's modules, or at most two calls below
one."""
import bisect
import pathlib
import re
import sys

PREFIX = re.compile(r"^ ?\[ *\d+\.\d+\](\[ *[TC]\d+\])? ?")
# The line with which a report begins, but for a ruler above it.
TITLE = re.compile(
    r"(watchdog: )?BUG[: ]|(NMI )?watchdog: .*hard LOCKUP|WARNING: |UBSAN: |Oops: |general protection fault"
    r"|kernel BUG at |Kernel panic|double fault"
    r"|(rcu: )?INFO: (task|trying|possible|suspicious|rcu)|kmemleak: .* disabled|unregister_netdevice: waiting"
    r"|ref_tracker: ")
RULER = re.compile(r"={20,}|-+\[ cut here \]-+")
MODULE = re.compile(r"\[ontime(_napi)?( [0-9a-f]+)?\]")
ACCESS = re.compile(r" to 0x[0-9a-f]+ of \d+ bytes by ")
CHECKS = "kasan: KernelAddressSanitizer initialized", "kcsan: enabled early"
LINES = 200


def ends(report, text):
    """Whether a report has this as its last line."""
    if "cut here" in report[0]:
        return "---[ end trace" in text
    if "====" in report[0] and any("KASAN:" in line or "KCSAN:" in line for line in report[:6]):
        return RULER.match(text) is not None and len(report) > 3
    return ("---[ end trace" if any(line.startswith("Oops") for line in report) else "</TASK>") in text


def reports(log):
    """The reports of a kernel's log, each a list of lines without times."""
    lines = [PREFIX.sub("", line.rstrip()) for line in log.splitlines()]
    found, current = [], None
    for number, text in enumerate(lines):
        # An oops goes on where a BUG began.
        if TITLE.match(text) and not (current and text.startswith("Oops")):
            above = [at for at in range(max(0, number - 3), number) if RULER.match(lines[at])]
            current = lines[above[-1] if above else number:number + 1]
            found.append(current)
        elif current:
            current.append(text)
        if current and (ends(current, text) or len(current) == LINES):
            current = None
    return found


def is_ours(race):
    """Whether a module takes part in a data race. The functions follow each access, the innermost first."""
    accesses = [at for at, line in enumerate(race) if ACCESS.search(line)]
    return any(MODULE.search(function) for at in accesses for function in race[at + 1:at + 4])


def leaks(text, symbols):
    """The reports of kmemleak; addresses in a module that is gone get the names that they had."""
    lines = [line.split() for line in symbols.splitlines()]
    names = sorted((int(address, 16), name, module) for address, _, name, module in lines)
    starts = [address for address, _, _ in names]

    def name(match):
        address = int(match[0], 16)
        at = bisect.bisect(starts, address) - 1
        if at < 0 or address - starts[at] > 65536:
            return match[0]
        return f"{names[at][1]}+{address - starts[at]:#x} {names[at][2]}"

    text = re.sub(r"(?<=^    )0xffffffff[0-9a-f]{8}$", name, text, flags=re.MULTILINE)
    return [block.splitlines() for block in re.split(r"^(?=unreferenced object )", text, flags=re.MULTILINE)[1:]]


def explanations(file):
    lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split(" | ", 1) for line in lines]
    for line, pair in zip(lines, pairs):
        if len(pair) != 2 or not pair[1].strip():
            sys.exit(f"{file}: this line gives no reason: {line}")
    return [(re.compile(pattern), reason) for pattern, reason in pairs]


def main(known, out):
    known, out = explanations(pathlib.Path(known)), pathlib.Path(out)
    files = {name: (out / name).read_text(errors="replace") if (out / name).exists() else ""
             for name in ("dmesg", "console-first", "console", "kmemleak", "symbols")}
    faults = []
    if not any(check in files["dmesg"] for check in CHECKS):
        faults.append("the log has no line of KASAN's or KCSAN's begin: the guest did not come to its end, its log is "
                      "too short, or its kernel is not a debug kernel")
    if "kmemleak: Kernel memory leak detector initialized" in files["dmesg"] and not (out / "kmemleak").exists():
        faults.append("kmemleak was not asked")
    logged, races, bad, explained = set(), set(), 0, {}
    for source in "dmesg", "console-first", "console", "kmemleak":
        found = leaks(files[source], files["symbols"]) if source == "kmemleak" else reports(files[source])
        for report in found:
            title = next((line for line in report if TITLE.match(line)), report[0])
            text = "\n".join(report)
            # The console has again what the log has.
            if source == "console" and title in logged:
                continue
            if source == "dmesg":
                logged.add(title)
            reason = next((reason for pattern, reason in known if pattern.search(text)), None)
            if reason:
                explained[reason] = explained.get(reason, 0) + 1
            elif "BUG: KCSAN:" in title and not is_ours(report):
                races.add(title)
            else:
                bad += 1
                print(f"---- {source}: {title}\n{text}\n")
    for reason, count in explained.items():
        print(f"explained, {count} times: {reason}")
    if races:
        print(f"{len(races)} data races of the kernel itself")
    for fault in faults:
        print(f"{out}: {fault}")
    print(f"{bad} reports without a reason")
    return 1 if bad or faults else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("debug-reports.py KNOWN OUT")
    sys.exit(main(*sys.argv[1:]))
