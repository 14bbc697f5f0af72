#!/usr/bin/env bash
# RUSTC_WORKSPACE_WRAPPER of scripts/fuzz.sh: RUSTC ARGUMENTS...
# Only the crates of this workspace are instrumented, because only they are under test. Third-party crates are those
# that `cargo test` has built. Build scripts and procedural macros run without the fuzzer, and the laboratory is not
# under test.
case " $* " in
    *" --crate-name build_script_"* | *" --crate-type proc-macro "* | *" --print"*) exec "$@" ;;
    *" --crate-name ontime_lab "* | *" --crate-name ontime_bench "*) exec "$@" ;;
esac
# Coverage of edges by counters, and operands of comparisons. Optimization would switch off debug assertions, which are
# a part of what is tested.
exec "$@" -Copt-level=1 -Cdebug-assertions=on -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares
