# Two commands for a newcomer: `make demo` and `make test`. Both do all set-up themselves.
# For packagers: `make deb`, or `make dist && make install DESTDIR=... PREFIX=/usr`.

REPORT ?= target/report
REQUESTS ?= 150
MINUTES ?= 2
PREEMPTIONS ?= 4
ONTIME = target/release/ontime

# Where `make install` installs.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
TMPFILESDIR ?= $(PREFIX)/lib/tmpfiles.d
ZSHDIR ?= $(PREFIX)/share/zsh/vendor-completions

.PHONY: demo test tests conformance debug-kernels thorough endurance hundred hostile figures papers \
	sched-ext fuzz model-check miri docs lint setup release images clean dist install deb deb-test systemd-test \
	monitoring-test dashboard-test dashboard-picture kubevirt-test rpm dra dra-test test-kubernetes test-kubelet \
	dist-lab install-lab deb-build-test

## demo: an RT VM and two bulk VMs, idle and under TCP, method by method, measured at the wire; a table and a page
demo: release images
	@mkdir -p $(REPORT)
	$(ONTIME)-lab bench rt-server --cpus 2 --load tcp,none --requests $(REQUESTS) \
		--json $(REPORT)/rt-server.json --csv $(REPORT)/rt-server.csv --html $(REPORT)/index.html
	@echo "The report page: $(abspath $(REPORT))/index.html"

## test: every test, those that need a host of their own in the emulated one
test: release
	@scripts/prometheus.sh
	@$(MAKE) --no-print-directory -j 2 images tests
	scripts/test.sh $(ONTIME)

## monitoring-test: promtool and a real Prometheus look at a real daemon's metrics, the alert rules and the dashboard
monitoring-test: setup
	@scripts/prometheus.sh
	cargo test -p ontime --test monitoring

## dashboard-test: Grafana's published schema takes the dashboard; needs Go
dashboard-test:
	scripts/go.sh scripts/grafana test -count=1 ./...

## dashboard-picture: docs/use/dashboard.png, drawn by Grafana's libraries from a real daemon's metrics; needs npm
dashboard-picture: release
	@scripts/setup.sh chromium
	@scripts/prometheus.sh
	scripts/dashboard.sh $(ONTIME) docs/use/dashboard.png

## kubevirt-test: the types of KubeVirt's API take the example of a VM; needs npm
kubevirt-test:
	scripts/kubevirt.sh

## thorough: what `make test` leaves out: tests of this machine's real speed, long ones of plans and of the lab (hours)
thorough: setup
	scripts/thorough.sh $(ONTIME)

## conformance: public test suites in a guest, on its own stack and on outsourced sockets; SUITE=all for every suite
conformance: release images
	scripts/conformance.sh $(ONTIME) $(or $(SUITE),default)

## debug-kernels: both modules on kernels that find errors in them (hours); BUILDS="kasan kcsan" FLAVOURS="cloud rt"
debug-kernels: release images
	scripts/debug-test.sh $(ONTIME)

## endurance: applied and reset a hundred times under traffic in the emulated host, and every fault (half an hour)
endurance: release images
	CYCLES=100 INSTRUCTION=1 $(ONTIME)-lab-tests path_holds_under_traffic_and_faults

## hundred: what 100 VMs and 64 queues cost the daemon on this machine, and what it costs idle
hundred: release
	scripts/bench/hundred.sh $(ONTIME)

## hostile: by how much 100 hostile processes of a user delay the placement of a new RT VM on this machine (3 minutes)
hostile: release
	scripts/bench/hostile.sh $(ONTIME)

## figures: the main experiment with 20,000 requests a row, on two CPUs and on one, 6.12-rt as well (some 30 hours)
figures: release images
	@mkdir -p $(REPORT)
	$(ONTIME)-lab bench rt-server --cpus 2 --load tcp,none --requests 20000 \
		--json $(REPORT)/figures.json --csv $(REPORT)/figures.csv --html $(REPORT)/figures.html
	$(ONTIME)-lab bench rt-server --load tcp,small-packets,none --kernel 7.2-rt,6.12-rt --requests 20000 \
		--json $(REPORT)/one-cpu.json --csv $(REPORT)/one-cpu.csv --html $(REPORT)/one-cpu.html

## papers: every experiment at its paper's size (some 60 hours of a core; it says how many); EXPERIMENTS="rt-server ..."
papers: release
	scripts/bench/papers.sh $(ONTIME)-lab $(REPORT)/papers $(EXPERIMENTS)

## sched-ext: the binary with back end sched_ext (clang, libelf, zlib); the next plain build is without it
sched-ext:
	@scripts/setup.sh clang libelf-dev zlib1g-dev
	cargo build --release --features ontime/sched-ext

## fuzz: every parser of bytes that guests, containers and users choose, for MINUTES in all (CONTRIBUTING.md)
fuzz:
	@scripts/setup.sh g++
	scripts/fuzz.sh $(MINUTES)

## docs: the documentation as a site in target/docs, by mdBook
docs:
	@scripts/docs.sh

## model-check: the lock-free parts in every order of their steps, up to PREEMPTIONS preemptions (CONTRIBUTING.md)
model-check: setup
	LOOM_MAX_PREEMPTIONS=$(PREEMPTIONS) cargo test --release -p ontime-model

## miri: the ledger and a parser under Miri, which finds undefined behaviour; needs rustup's nightly
miri:
	@cargo +nightly miri --version || { \
		echo "miri: run rustup toolchain install nightly --component miri,rust-src" >&2; exit 3; }
	MIRIFLAGS=-Zmiri-disable-isolation PROPTEST_CASES=4 cargo +nightly miri test -p ontime-sched -p ontime-tenants \
		--lib -- ledger::page connector::

## dra: the Kubernetes driver, target/ontime-dra; needs Go, as no other program does (docs/use/kubernetes.md)
dra:
	CGO_ENABLED=0 scripts/go.sh dra build -trimpath -ldflags '-s -w' -o $(abspath target)/ontime-dra .

## dra-test: the driver's tests; those with a real daemon need root and target/release/ontime
dra-test:
	@scripts/go.sh dra version
	@test -x $(ONTIME) || \
		echo "dra-test: $(ONTIME) is not built (make release): tests with a real daemon are skipped"
	@test "$$(id -u)" = 0 || echo "dra-test: not root: tests with a real daemon are skipped"
	scripts/go.sh dra vet ./...
	ONTIME=$$(test -x $(ONTIME) && echo $(abspath $(ONTIME))) scripts/go.sh dra test -count=1 ./...

## test-kubernetes: etcd, API server and scheduler from Go modules, drivers, daemons; ROUNDS, KILLS, SEED
test-kubernetes: release
	scripts/kubernetes-test.sh $(ONTIME)

## test-kubelet: a node with kubelet, containerd and runc in the emulated host: an RT pod, and a VM in a pod
test-kubelet: release images
	scripts/kubernetes-test.sh $(ONTIME) kubelet

## lint: rustfmt and clippy
lint: setup
	@cargo fmt --version && cargo clippy --version || { \
		echo "lint: rustfmt or clippy is missing; Debian: apt-get install rustfmt rust-clippy;" \
			"rustup: rustup component add rustfmt clippy" >&2; exit 3; }
	cargo fmt --all -- --check
	cargo clippy --workspace --all-targets -- -D warnings

setup:
	@scripts/setup.sh

## release: the programs in target/release
release: setup
	cargo build --release

tests: setup
	cargo test --workspace --no-run

## images: the emulator, and the emulated host's images and kernel modules, where they are missing
images: release
	$(ONTIME)-lab images

CRATES = cargo tree --locked -p $(1) -e normal --prefix none --format '{p}: {l}' | grep -v ' (/' | \
	sed 's/ (\*)$$//' | sort -u

## dist: what `make install` installs, in target/dist: program with its commit, man pages, completions, list of crates
dist:
	ONTIME_VERSION="$$(scripts/version.sh)" cargo build --profile installed --locked -p ontime -p ontime-manuals
	rm -rf target/dist
	target/installed/ontime-manuals target/dist
	install -m 755 target/installed/ontime target/dist/ontime
	$(call CRATES,ontime) > target/dist/crates.txt

## dist-lab: what `make install-lab` installs, in target/dist-lab: the laboratory, for a package of its own
dist-lab:
	ONTIME_VERSION="$$(scripts/version.sh)" cargo build --profile installed --locked -p ontime-bench
	rm -rf target/dist-lab
	install -D -m 755 target/installed/ontime-lab target/dist-lab/ontime-lab
	$(call CRATES,ontime-bench) > target/dist-lab/crates.txt

## install-lab: the laboratory from target/dist-lab, its man page and list of crates; DESTDIR, PREFIX
install-lab:
	install -D -m 755 target/dist-lab/ontime-lab $(DESTDIR)$(PREFIX)/bin/ontime-lab
	install -D -m 644 packaging/man/ontime-lab.8 $(DESTDIR)$(PREFIX)/share/man/man8/ontime-lab.8
	install -D -m 644 target/dist-lab/crates.txt $(DESTDIR)$(PREFIX)/share/doc/ontime-lab/crates.txt

## install: from target/dist and this tree, the list of files; DESTDIR, PREFIX, SYSCONFDIR. Configuration stays.
INSTALL_UNIT = sed 's,/usr/,$(PREFIX)/,' $(1) > target/dist/unit && \
	install -D -m 644 target/dist/unit $(DESTDIR)$(UNITDIR)/$(notdir $(1))
INSTALL_CONFIG = test -e $(DESTDIR)$(SYSCONFDIR)/$(3) || install -D -m $(1) $(2) $(DESTDIR)$(SYSCONFDIR)/$(3)
DOC = $(abspath $(DESTDIR)$(PREFIX)/share/doc/ontime)

install:
	@test -e target/dist/crates.txt || { \
		echo "install: nothing is built; run 'make dist' first, as the user who builds" >&2; exit 3; }
	install -D -m 755 target/dist/ontime $(DESTDIR)$(PREFIX)/bin/ontime
	$(call INSTALL_UNIT,packaging/systemd/ontimed.service)
	$(call INSTALL_UNIT,packaging/systemd/ontime-device@.service)
	$(call INSTALL_UNIT,packaging/systemd/ontime-metrics.service)
	$(call INSTALL_UNIT,packaging/systemd/ontime-metrics.timer)
	install -D -m 644 packaging/tmpfiles.d/ontime.conf $(DESTDIR)$(TMPFILESDIR)/ontime.conf
	$(call INSTALL_CONFIG,644,packaging/ontime/daemon.toml,ontime/daemon.toml)
	$(call INSTALL_CONFIG,755,packaging/libvirt/hooks/qemu.d/ontime,libvirt/hooks/qemu.d/ontime)
	install -d $(DESTDIR)$(PREFIX)/share/man/man1
	install -m 644 target/dist/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1
	install -D -m 644 packaging/man/ontimed.8 $(DESTDIR)$(PREFIX)/share/man/man8/ontimed.8
	install -D -m 644 target/dist/completions/ontime.bash \
		$(DESTDIR)$(PREFIX)/share/bash-completion/completions/ontime
	install -D -m 644 target/dist/completions/_ontime $(DESTDIR)$(ZSHDIR)/_ontime
	install -D -m 644 target/dist/completions/ontime.fish \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/ontime.fish
	cd docs && find . -type f ! -name SUMMARY.md ! -name README.md -exec install -D -m 644 {} $(DOC)/{} \;
	cd packaging && \
		find prometheus grafana ansible tuned cloud-init sos libvirt/examples kubevirt apparmor -type f \
		-exec install -D -m 644 {} $(DOC)/examples/{} \;
	install -m 644 CHANGELOG.md target/dist/crates.txt $(DOC)
	install -m 644 kernel/abi/ontime_abi.h crates/sockets/src/seccomp.json $(DOC)
# Links between pages, and to the files above, lead where these are installed.
	sed 's,(docs/,(,g; s, (\[LICENSE\](LICENSE)),,' README.md > $(DOC)/overview.md
	sed 's,(docs/,(,g' ARCHITECTURE.md > $(DOC)/ARCHITECTURE.md
	sed 's,(docs/,(,g' SECURITY.md > $(DOC)/SECURITY.md
	sed 's,(../README.md),(overview.md),; s,(../ARCHITECTURE.md),(ARCHITECTURE.md),' docs/README.md \
		> $(DOC)/README.md
	sed -i 's,](\.\./\.\./\([^)]*/\)*\([^)/]*\)),](../\2),g' $(DOC)/design/*.md $(DOC)/reference/*.md \
		$(DOC)/results/*.md $(DOC)/use/*.md
	chmod 644 $(DOC)/overview.md $(DOC)/ARCHITECTURE.md $(DOC)/SECURITY.md $(DOC)/README.md

## deb: Debian packages in target/deb; as root it installs what the build needs
deb:
	@scripts/deb.sh

## rpm: the RPM package in target/rpm; needs rpmbuild
rpm:
	@scripts/rpm.sh

## deb-test: installs, upgrades, removes and purges the packages in fresh Debian roots, and runs lintian; needs root
deb-test: deb
	@scripts/deb-test.sh

## deb-build-test: builds the packages in a new Debian 13, by its own Rust; needs root (half an hour)
deb-build-test: deb
	@scripts/deb-test.sh build

## systemd-test: the packages in an emulated Debian 13 under systemd, beside a libvirt VM; STAGES="doctor apparmor"
systemd-test: deb images
	@scripts/deb-test.sh systemd $(STAGES)

clean:
	cargo clean
