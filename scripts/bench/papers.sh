#!/bin/sh
# papers.sh LAB DIR [EXPERIMENT...]: every experiment at its paper's size, one after the other, with the CPUs for which
# it is built. Results go to DIR/NAME.json and .html; what is there already is not run again, so that an interrupted run
# goes on. With "hours" as LAB it only says how long each takes.
set -u
lab=${1:?papers.sh LAB DIR}
dir=${2:?papers.sh LAB DIR}
shift 2
wanted=" $* "

# An experiment a line: name; emulated CPUs, the clients' included; cases; seconds of the host's time a case; options.
# 20,000 requests take 110 s of the host's time.
experiments() {
    sed '/^ *#/d; s/^ *//' << 'END'
    rt-server         3  7   110   --cpus 2 --requests 20000
    ablation          3  5   110   --cpus 2 --requests 20000
    segments          3  4   110   --cpus 2 --requests 20000
    memcached         3  5   110   --cpus 2 --requests 20000
    rt-vms            5  12  20    --cpus 4 --method threaded,exclusive,partitioned,outsourcing --vms 1,10,40
    sampled-values    3  3   250   --cpus 2 --frames 1000000
    bulk              3  2   30    --cpus 2 --seconds 30
    connections       2  3   10
    voip              1  5   110   --requests 20000
    inversion         3  12  11    --cpus 2 --requests 2000
    vatc              2  20  6     --requests 1000
    vatc-network      2  12  6     --requests 1000
    kbp               2  45  6     --requests 1000
    xen-arm           2  12  110   --requests 20000
    guest-cyclictest  1  8   20    --seconds 20
    rta-periodic      1  24  100   --seconds 100
    rta-sporadic      1  24  55    --requests 100
    rta-scale         1  4   100   --seconds 100
    video             1  4   600   --seconds 600
    memcached-slo     2  9   200   --requests 20000
    registration      1  1   60
END
}

# Hours on one core: 90 s for each boot and case, and 8 s a second and emulated CPU (14 cases of rt-server with two CPUs
# and the clients' took an hour of a core for 2,000 requests, half of them under load).
hours() { # CPUS CASES SECONDS
    awk "BEGIN { printf \"%.1f\", $2 * (90 + $3 * $1 * 8) / 3600 }"
}

chosen() { # NAME
    case $wanted in "  " | *" $1 "*) return 0 ;; esac
    return 1
}

for name in "$@"; do
    experiments | grep -q "^$name " || { echo "papers: no experiment is named $name: see scripts/bench/papers.sh" >&2; exit 64; }
done
total=$(experiments | while read -r name cpus cases seconds _; do
    ! chosen "$name" || hours "$cpus" "$cases" "$seconds" && echo
done | awk '{ sum += $1 } END { printf "%.0f", sum }')
echo "papers: about $total hours of a core in all; the results: $dir"
mkdir -p "$dir" || exit 3
failed=$(experiments | {
    failed=
    while read -r name cpus cases seconds options; do
        chosen "$name" || continue
        echo "papers: $name $options: about $(hours "$cpus" "$cases" "$seconds") hours" >&2
        [ "$lab" != hours ] && [ ! -s "$dir/$name.json" ] || continue
        # shellcheck disable=SC2086 # options are words
        "$lab" bench "$name" $options --json "$dir/$name.part" --html "$dir/$name.html" < /dev/null \
            > "$dir/$name.txt" && mv "$dir/$name.part" "$dir/$name.json" || failed="$failed $name"
    done
    echo "$failed"
})
[ -z "$failed" ] || { echo "papers: not measured, or not whole:$failed; begin again for these" >&2; exit 1; }
