# Resets and applies CYCLES times under traffic. Sourced by path.sh; the daemon runs and has applied.
echo "== $CYCLES cycles of reset and apply under traffic"
cycle() { ontime reset > /lab/cycle.log && ontime apply >> /lab/cycle.log; }
cycles() { done_cycles=0; while [ $done_cycles -lt "$CYCLES" ]; do cycle; done_cycles=$((done_cycles + 1)); done; }
incidents > /lab/incidents-before
resets
# As long as the cycles, so that the slowest of many answers is not compared with the slowest of a few.
window default sleep $((2 * CYCLES))
usual=$slowest noise=$((lost * 1000 / (segments + 1)))
ontime apply > /dev/null
window applied sleep 1
window cycles cycles
[ "$done_cycles" -ge 1 ] && [ "$segments" -gt 500 ] && [ "$asked" -gt 20 ] || fail "there was no traffic to speak of"
# Bursts of segments are lost also while nothing is applied.
[ $lost -le $((segments / 20)) ] || fail "$lost of $segments segments were lost"
[ "$unanswered" -le 1 ] || fail "$unanswered requests were not answered" # one may be on its way at the end
# A few cycles are no measurement. During a reset the RT VM has the priority of an ordinary VM, and waits for others as
# it did before: 7 ms at 1 ns an instruction, 17 ms at 4 ns.
if [ "$CYCLES" -ge 100 ]; then
    [ $lost -le $((segments * (noise + 1) / 1000 + 1)) ] ||
        fail "$lost of $segments segments were lost, $noise of 1000 without cycles"
    [ "$slowest" -le 10000 ] || [ "$slowest" -le "$usual" ] ||
        fail "the RT VM stood still for $slowest us; without cycles for $usual"
fi
incidents > /lab/incidents-after
diff /lab/incidents-before /lab/incidents-after
rm /lab/ask
within 60 test -e /lab/asked
grep -q 'dropped messages = 0' /lab/ask.log ||
    fail "answers to the client outside were lost: $(tail -n 12 /lab/ask.log)"
