#!/bin/sh
# A guest's first process, in place of the one on its disk: does what comes on its console, a command a line, and says TOLD to each
# (`lab-vm tell`). Real-time applications are stock rt-app; the module is there, and is loaded when somebody says so.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
stty -F /dev/ttyS0 raw -echo
cd /tmp || exit 1

config() { # CALIBRATION JOBS WORK PERIOD DELAY ATTRIBUTES [GAPS]: rt-app's, us; jobs are released from DELAY on, each PERIOD or after these gaps
    if [ -z "${7-}" ]; then
        phases="\"all\": { \"loop\": $2, \"run\": $3, \"timer\": { \"ref\": \"own\", \"period\": $4, \"mode\": \"absolute\" } }"
    else
        phases=
        for gap in $7; do
            phases="$phases${phases:+, }\"p${#phases}\": { \"run\": $3, \"timer\": { \"ref\": \"own\", \"period\": $gap, \"mode\": \"absolute\" } }"
        done
    fi
    cat <<JSON
{ "global": { "calibration": $1, "log_size": 1, "logdir": "/tmp", "log_basename": "$tag", "mem_buffer_size": 4096, "lock_pages": true },
  "tasks": { "rta": { "delay": $5, $6 "loop": 1, "phases": { $phases } } } }
JSON
}

# run TAG POLICY RUNTIME PERIOD WORK JOBS DELAY [GAP...] (us; POLICY SCHED_DEADLINE or SCHED_OTHER): a job computes for WORK. Jobs come each PERIOD,
# or, where there are GAPs, so long after the one before. At its end it says, in one line, what was left of each job's period, below 0 where it
# ended later: `RTA TAG STATUS SLACK... end`. rt-app counts to the next release; what that is later than the period is taken off. Nobody speaks while one still
# runs: each character is an interrupt on top of a job.
run() {
    tag=$1 period=$4
    attributes="\"policy\": \"$2\", \"dl-runtime\": $3, \"dl-period\": $4, \"dl-deadline\": $4,"
    set -- "$6" "$5" "$4" "$7" "$attributes" "$(shift 7; echo "$*")"
    config "$loop_ns" "$@" > "$tag.json"
    flock -s /tmp/running rt-app "$tag.json" > "$tag.said" 2>&1
    status=$?
    flock /tmp/running awk -v name="$tag" -v head="RTA $tag $status" -v period="$period" -v gaps="$6" '
        BEGIN { n = split(gaps, gap) }
        !/^#/ {
            i++; slack = i <= n ? $8 - gap[i] + period : $8; line = line " " slack
            if (slack < 0 && late++ < 3) print "RTA-LATE " name " " i " " $0
        }
        END { print head line " end" }' "$tag-rta-0.log"
    rm -f "$tag".* "$tag-rta-0.log"
}
rta() { run "$@" & }

# register TAG COUNT STEP PAUSE (us): makes itself a deadline task with 2 ms in 20 ms, then asks COUNT times for STEP more or that less again, PAUSE
# apart: `RTA TAG STATUS NS... end`, what each call took.
register() {
    {
        perl -e '
            use strict;
            my ($count, $step, $pause) = @ARGV;
            # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period. sched_setattr(2).
            sub attributes { pack("LLQlLQQQ", 48, 6, 0, 0, 0, $_[0], 20_000_000, 20_000_000) }
            sub ns { my ($s, $n) = unpack("qq", $_[0]); $s * 1_000_000_000 + $n }
            my $first = attributes(2_000_000);
            syscall(314, 0, $first, 0) == 0 or die "sched_setattr: $!";
            my ($begun, $ended) = (pack("qq", 0, 0), pack("qq", 0, 0));
            my @took;
            for my $n (1 .. $count) {
                select(undef, undef, undef, $pause / 1e6);
                my $attributes = attributes(2_000_000 + $step * 1_000 * ($n % 2));
                # Nothing of perl between the readings but the calls themselves.
                syscall(228, 1, $begun);
                my $status = syscall(314, 0, $attributes, 0);
                syscall(228, 1, $ended);
                $status == 0 or die "sched_setattr: $!";
                push @took, ns($ended) - ns($begun);
            }
            print "@took"' "$2" "$3" "$4" > "$1.said"
        status=$?
        flock /tmp/running echo "RTA $1 $status $(cat "$1.said") end"
        rm -f "$1.said"
    } &
}

# ping TAG COUNT PAUSE (us): the module's call that asks for nothing, so often: `RTA TAG STATUS NS... end`, what each took.
ping() {
    {
        perl -e '
            use strict;
            my ($count, $pause) = @ARGV;
            my @took;
            for (1 .. $count) {
                select(undef, undef, undef, $pause / 1e6);
                open my $file, "<", "/sys/module/ontime/parameters/ping" or die "ping: $!";
                defined(my $line = <$file>) or die "ping: $!";
                push @took, $line + 0;
            }
            print "@took"' "$2" "$3" > "$1.said"
        status=$?
        flock /tmp/running echo "RTA $1 $status $(cat "$1.said") end"
        rm -f "$1.said"
    } &
}

# What a loop of rt-app takes, ns: now, while nothing else runs. It measures for itself; a job of 10 ms says how exact that is.
tag=calibrate
config '"CPU0"' 5 10000 50000 0 "" > calibrate.json
rt-app calibrate.json > calibrate.said 2>&1
loop_ns=$(sed -n 's/.*pLoad = \([0-9]*\)ns.*/\1/p' calibrate.said)
echo "RTA-LOOP $loop_ns $(awk '!/^#/ { print $3 }' calibrate-rta-0.log | sort -n | head -n 1)" > /dev/console
echo "LAB-GUEST-UP rta" > /dev/console
exec < /dev/ttyS0 > /dev/ttyS0 2>&1
while read -r line; do
    echo TOLD
    eval "$line"
done
