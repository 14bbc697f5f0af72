#!/usr/bin/env bash
# Every test: cargo's, then those of the emulated host. The last line counts what passed, failed and was skipped, each
# skipped test with its reason above it. test.sh ONTIME
# A test that cannot run here prints "SKIPPED" with its reason, or is ignored with a reason.
set -uo pipefail
ontime=$1
here=$(dirname "$0")
logs=$here/../target/test
mkdir -p "$logs"

# The output of passing tests goes to the log only; the terminal shows the rest.
cargo test --workspace --no-fail-fast -- --show-output 2>&1 | tee "$logs/cargo.log" |
    awk '/^successes:$/ { hidden = 1 } /^failures:$|^test result: / { hidden = 0 } !hidden { print; fflush() }'
unit=$?

# Without those of an earlier run, also where the program does not start.
: > "$logs/lab.results"
RESULTS=$logs/lab.results "$ontime-lab-tests"
lab=$?

# Lines "skipped NAME REASON". A test that only runs inside another one is not counted, nor one of which a part has run.
awk '/^---- .* stdout ----$/ { name = $2; said = 0 }
    /^SKIPPED in part/ { sub(/^SKIPPED in part:? */, ""); print "partly", name, $0; next }
    /^SKIPPED/ && !said++ { sub(/^SKIPPED:? */, ""); print "skipped", name, $0 }
    /^test .* \.\.\. ignored/ && !/, run by / { name = $2; sub(/^.* \.\.\. ignored,? */, ""); print "ignored", name, $0 }' \
    "$logs/cargo.log" > "$logs/skipped"
sed -e 's/^partly \([^ ]*\) /skipped in part: \1: /' -e t -e 's/^[a-z]* \([^ ]*\) /skipped: \1: /' "$logs/skipped"
# The failures again, at the end of the output.
sed -n 's/^test \(.*\) \.\.\. FAILED$/failed: \1/p' "$logs/cargo.log"
sed -n 's/^failed //p' "$logs/lab.results" | while read -r name; do
    echo "failed: $name; the end of target/test/$name.log:"
    tail -n 40 "$logs/$name.log"
done
awk -v results="$logs/lab.results" -v skips="$logs/skipped" '
    /^test result: / { for (i = 1; i < NF; i++) { if ($(i + 1) == "passed;") passed += $i; if ($(i + 1) == "failed;") failed += $i } }
    /^error: could not compile|^error: no test target/ { failed++ }
    END {
        while ((getline line < results) > 0) { if (line ~ /^ok /) passed++; else if (line ~ /^failed /) failed++ }
        # cargo counts a test that skipped itself as passed.
        while ((getline line < skips) > 0) {
            if (line !~ /^partly /) skipped++
            if (line ~ /^skipped /) passed--
        }
        printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped
    }' "$logs/cargo.log"
[ "$unit" -eq 0 ] && [ "$lab" -eq 0 ]
