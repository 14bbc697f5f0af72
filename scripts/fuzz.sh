#!/usr/bin/env bash
# Coverage-guided fuzzing of the crate ontime-fuzz by AFL++, on stable Rust: fuzz.sh [MINUTES [TARGET...]]
# MINUTES is the time of the whole run. CORES in the environment says how many cores are used (all).
# What is found stays in target/fuzz/TARGET/default, and the next run goes on from there. Ends with 1 after a crash or a
# hang, with 3 where the fuzzer cannot be built.
set -uo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-2}
shift || true
cores=${CORES:-$(nproc)}
tools=$PWD/target/tools
out=$PWD/target/fuzz
corpus=$PWD/crates/fuzz/corpus
# cargo-afl keeps AFL++ there; its default is the home directory.
export XDG_DATA_HOME=$tools/share
export PATH=$tools/bin:$PATH
mkdir -p "$tools" "$out"
[[ $minutes =~ ^[0-9]+$ ]] && [ "$minutes" -gt 0 ] || { echo "fuzz: $minutes is not a number of minutes" >&2; exit 2; }

# The tool and the library must have one version: the library's is in Cargo.lock.
version=$(awk '$1 == "name" && $3 == "\"afl\"" { getline; gsub(/"/, "", $3); print $3 }' Cargo.lock)
afl_fuzz() {
    find "$XDG_DATA_HOME/afl.rs/$(rustc_name)/afl.rs-$version" -path '*/bin/afl-fuzz' 2> /dev/null | head -n 1
}
rustc_name() {
    rustc -vV | awk '/^release:/ { r = $2 } /^commit-hash:/ && $2 != "unknown" { h = "-" substr($2, 1, 7) } END { print "rustc-" r h }'
}
if [ -z "$(afl_fuzz)" ]; then
    echo "fuzz: building cargo-afl $version into target/tools"
    # For another compiler than before, the tool is there and AFL++ is not.
    { cargo install --quiet --root "$tools" --locked --force --version "$version" cargo-afl &&
        { [ -n "$(afl_fuzz)" ] || cargo afl config --build --verbose; }; } > "$out/tools.log" 2>&1 || {
        tail -n 20 "$out/tools.log" >&2
        echo "fuzz: cargo-afl $version cannot be built: Rust 1.88, make and cc are needed (target/fuzz/tools.log)" >&2
        exit 3
    }
fi

echo "fuzz: building the targets"
host=$(rustc -vV | sed -n 's/^host: //p')
# With --target, build scripts and procedural macros are not instrumented. Optimized by cargo-afl's flags, not by a
# profile: level 1, as a higher one costs more minutes of building than a short run gains.
AFL_OPT_LEVEL=${AFL_OPT_LEVEL:-1} CARGO_TARGET_DIR=$out/build \
    cargo afl build --quiet --target "$host" -p ontime-fuzz --features afl || exit 3
binary=$out/build/$host/debug/ontime-fuzz
unset AFL_OPT_LEVEL
if [ $# -gt 0 ]; then targets=("$@"); else mapfile -t targets < <(ls "$corpus"); fi

export AFL_NO_UI=1 AFL_SKIP_CPUFREQ=1 AFL_NO_AFFINITY=1 AFL_AUTORESUME=1 AFL_FAST_CAL=1
export AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1 AFL_CRASHING_SEEDS_AS_NEW_CRASH=1
# A hang is 10 s long: the machine may be busy.
export AFL_HANG_TMOUT=10000
seconds=$((minutes * 60 * cores / ${#targets[@]}))
rounds=$(((seconds + 599) / 600))
slice=$((seconds / rounds))
[ "$slice" -ge 5 ] || slice=5
stat_of() { awk -F' *: *' -v key="$2" '$1 == key { print $2 }' "$out/$1/default/fuzzer_stats" 2> /dev/null; }

fuzz() { # TARGET
    local dictionary=()
    [ -f "crates/fuzz/dict/$1.dict" ] && dictionary=(-x "crates/fuzz/dict/$1.dict")
    cargo afl fuzz -i "$corpus/$1" -o "$out/$1" -V "$slice" -t 2000 -m none "${dictionary[@]}" -- "$binary" "$1" \
        > "$out/$1.log" 2>&1 || { tail -n 15 "$out/$1.log" >&2; echo "fuzz: afl-fuzz failed on $1" >&2; return 1; }
    echo "fuzz: $1: $(stat_of "$1" execs_done) executions, $(stat_of "$1" edges_found) edges," \
        "$(stat_of "$1" saved_crashes) crashes, $(stat_of "$1" saved_hangs) hangs"
}

echo "fuzz: ${#targets[@]} targets on $cores cores, $rounds rounds of $slice s each"
for ((core = 0; core < cores; core++)); do
    (
        failed=0
        for ((round = 0; round < rounds; round++)); do
            for ((at = core; at < ${#targets[@]}; at += cores)); do fuzz "${targets[at]}" || failed=1; done
        done
        exit "$failed"
    ) &
done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done

printf '%-14s %12s %8s %8s %6s\n' target executions edges crashes hangs
for target in "${targets[@]}"; do
    found=("$(stat_of "$target" saved_crashes)" "$(stat_of "$target" saved_hangs)")
    printf '%-14s %12s %8s %8s %6s\n' "$target" "$(stat_of "$target" execs_done)" "$(stat_of "$target" edges_found)" \
        "${found[@]}"
    [ "${found[*]}" = "0 0" ] || failed=1
done
exit "$failed"
