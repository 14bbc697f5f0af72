#!/usr/bin/env bash
# Coverage-guided fuzzing of the crate ontime-fuzz by libFuzzer, on stable Rust: fuzz.sh [MINUTES [TARGET...]]
# MINUTES is the time of the whole run without the build. Environment variables: CORES, the number of cores used (all),
# and SEED, the seed of the mutations (another one each time). Inputs that reach new code stay in
# target/fuzz/TARGET/corpus, and the next run starts with them. An input that crashes, hangs for 10 s or takes 1 GiB of
# memory stays in target/fuzz/TARGET/found. Ends with 1 after such a finding, with 3 where the targets cannot be built.
set -uo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-2}
shift || true
cores=${CORES:-$(nproc)}
out=target/fuzz
[[ $minutes =~ ^[0-9]+$ ]] && [ "$minutes" -gt 0 ] || { echo "fuzz: $minutes is not a number of minutes" >&2; exit 2; }
if [ $# -gt 0 ]; then targets=("$@"); else mapfile -t targets < <(ls crates/fuzz/corpus); fi

echo "fuzz: building the targets"
# libFuzzer itself is C++ code of the crate libfuzzer-sys.
RUSTC_WORKSPACE_WRAPPER=$PWD/scripts/fuzz-rustc.sh CXXFLAGS="${CXXFLAGS:-} -O2" \
    cargo build --quiet --locked -p ontime-fuzz --features fuzzer || exit 3
seconds=$((minutes * 60 * cores / ${#targets[@]}))
[ "$seconds" -ge 1 ] || seconds=1

fuzz() { # TARGET
    local dictionary=() work=$out/$1
    [ -f "crates/fuzz/dict/$1.dict" ] && dictionary=(-dict="crates/fuzz/dict/$1.dict")
    mkdir -p "$work/corpus" "$work/found"
    FUZZ_TARGET=$1 target/debug/ontime-fuzz "$work/corpus" "crates/fuzz/corpus/$1" "${dictionary[@]}" \
        -max_total_time="$seconds" -max_len=4096 -timeout=10 -rss_limit_mb=1024 -artifact_prefix="$work/found/" \
        -print_final_stats=1 -seed="${SEED:-0}" > "$work/log" 2>&1
}
# The limit of time is the machine's, which may be busy. An input that alone takes less than 10 s of CPU time is no
# finding.
only_slow() { # TARGET
    local input
    grep -q 'libFuzzer: timeout' "$out/$1/log" || return 1
    for input in "$out/$1/found"/timeout-*; do
        (ulimit -t 10 && FUZZ_TARGET=$1 target/debug/ontime-fuzz -timeout=0 "$input" > /dev/null 2>&1) || return 1
        rm "$input"
    done
    echo "fuzz: $1 ended early: the machine was too busy for an input"
}
stat_of() { sed -n "s/^stat::$2: *//p" "$out/$1/log"; }

echo "fuzz: ${#targets[@]} targets on $cores cores, $seconds s each"
jobs=()
for ((core = 0; core < cores; core++)); do
    (
        failed=0
        for ((at = core; at < ${#targets[@]}; at += cores)); do
            fuzz "${targets[at]}" || only_slow "${targets[at]}" && continue
            failed=1
            echo "fuzz: ${targets[at]}: see $out/${targets[at]}/log" >&2
        done
        exit "$failed"
    ) &
    jobs+=($!)
done
failed=0
for job in "${jobs[@]}"; do wait "$job" || failed=1; done

printf '%-14s %12s %8s %8s\n' target executions edges corpus
for target in "${targets[@]}"; do
    # From the last progress line: `#N DONE cov: EDGES ft: FEATURES corp: INPUTS/BYTES ...`
    edges=$(sed -n 's/^#[0-9]*.* cov: \([0-9]*\) .*/\1/p' "$out/$target/log" | tail -n 1)
    printf '%-14s %12s %8s %8s\n' "$target" "$(stat_of "$target" number_of_executed_units)" "$edges" \
        "$(find "$out/$target/corpus" -type f | wc -l)"
done
times > "$out/times"
echo "fuzz: CPU time in programs and in the kernel, the build included: $(tail -n 1 "$out/times")"
exit "$failed"
