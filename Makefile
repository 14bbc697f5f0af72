# Two commands for a newcomer: `make demo` and `make test`. Both do all set-up themselves.

REPORT ?= target/report
REQUESTS ?= 150
ONTIME = target/release/ontime

.PHONY: demo test tests conformance thorough endurance hundred figures exclusive sched-ext lint setup release images clean

## demo: an RT VM and two bulk VMs under flood, method by method, measured at the wire; a table and a page
demo: release images
	@mkdir -p $(REPORT)
	$(ONTIME) bench rt-server --load tcp,small-packets,none --requests $(REQUESTS) --json $(REPORT)/rt-server.json \
		--csv $(REPORT)/rt-server.csv --html $(REPORT)/index.html
	@echo "The report page: $(abspath $(REPORT))/index.html"

## test: every test, those that need a host of their own in the emulated one
test: release
	@$(MAKE) --no-print-directory -j 2 images tests
	scripts/test.sh $(ONTIME)

## thorough: what `make test` leaves out: tests that depend on this machine's real speed, and those of the emulated host that are long (hours)
thorough: sched-ext
	cargo test --workspace -- --ignored real_speed
	$(ONTIME) lab images
	scripts/lab-test.sh $(ONTIME) by-name

## conformance: public test suites in a guest, on its own stack and on outsourced sockets; SUITE=all for every suite
conformance: release images
	scripts/conformance.sh $(ONTIME) $(or $(SUITE),default)

## endurance: applied and reset a hundred times under traffic in the emulated host, and every fault (half an hour)
endurance: release images
	CYCLES=100 INSTRUCTION=1 scripts/lab-test.sh $(ONTIME) path_holds_under_traffic_and_faults

## hundred: what 100 VMs and 64 queues cost the daemon on this machine, and what it costs idle
hundred: release
	scripts/bench/hundred.sh $(ONTIME)

## figures: the main table of docs/results.md, 20,000 requests a method (hours), on 7.2-rt and 6.12-rt
figures: release images
	@mkdir -p $(REPORT)
	$(ONTIME) bench rt-server --load tcp,small-packets,none --kernel 7.2-rt,6.12-rt --requests 20000 \
		--json $(REPORT)/figures.json --csv $(REPORT)/figures.csv --html $(REPORT)/figures.html

## exclusive: the paper's exclusive CPU beside what it is compared with; two CPUs, so on the real clock (indicative)
exclusive: release images
	@mkdir -p $(REPORT)
	$(ONTIME) bench rt-server --clock real --cpus 2 --method vanilla,threaded,exclusive,partitioned \
		--requests $(REQUESTS) --json $(REPORT)/exclusive.json --html $(REPORT)/exclusive.html

## sched-ext: the binary with the back end sched_ext for reserved CPU time (clang, libelf, zlib); the next plain build is without it
sched-ext:
	@scripts/setup.sh clang libelf-dev zlib1g-dev
	cargo build --release --features ontime/sched-ext

lint: setup
	@cargo fmt --version && cargo clippy --version || { echo "lint: rustfmt or clippy is missing; Debian: apt-get install rustfmt" \
		"rust-clippy; rustup: rustup component add rustfmt clippy" >&2; exit 3; }
	cargo fmt --all -- --check
	cargo clippy --workspace --all-targets -- -D warnings

setup:
	@scripts/setup.sh

release: setup
	cargo build --release

tests: setup
	cargo test --workspace --no-run

images: release
	$(ONTIME) lab images

clean:
	cargo clean
