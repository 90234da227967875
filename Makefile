# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A source distribution of the library has no laboratory.
LAB := $(wildcard lab)
BENCH_STAMP := $(VENV)/.installed-bench
SITE_STAMP := $(VENV)/.installed-site
WARM = $(BIN)/python -m fenchel warmup --dtype $(1)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: test-triton gpu-report help setup warm demo docs test test-all check check-site check-targets check-oldest check-newest bench clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP)  ## build .venv with everything

# torch first and alone: the pin in constraints.txt must be the build that every later step finds.
$(STAMP): pyproject.toml $(LAB:=/pyproject.toml) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Fenchel needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch
	@$(INSTALL) -e '.[dev]' $(addprefix -e ,$(LAB))
	@touch $@

$(BENCH_STAMP): $(STAMP)
	@$(INSTALL) -e 'lab[bench]'
	@touch $@

demo: setup  ## run the tour on embedded data and write report/index.html
	@$(BIN)/fenchel tour --out report

$(SITE_STAMP): $(STAMP)
	@$(INSTALL) -e '.[site]'
	@touch $@

docs: $(SITE_STAMP)  ## build the site: build/html/index.html
	@$(BIN)/python docs/build.py

# Needs Chromium and Node, the system's packages; not part of continuous integration.
check-site: $(SITE_STAMP)  ## build the site and the packages, check them, and click through the site in headless Chromium
	@$(BIN)/python docs/check.py
	@node --test docs/explorer/tests
	@npx --yes -p typescript@5.9 tsc -p docs/explorer
	@$(BIN)/python docs/explorer/tests/browser.py

# Kernels first, one process per precision: two test processes would each compile all of them.
warm: setup
	@$(call WARM,float32) & $(call WARM,float64); wait

test: warm  ## run the tests of the library and of the laboratory, but for the slow ones
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-all: warm  ## run all tests
	@$(BIN)/python -m pytest -q -n 2 --dist worksteal
	@$(MAKE) --no-print-directory test-triton

# Triton reads these variables when it is imported: a process of its own. Few examples, for the interpreter is slow, and
# of what is slowest, derivatives of second order, those of one map: all share the formulas, and each has its own kernels.
ON_TRITON := FENCHEL_KERNELS=triton TRITON_INTERPRET=1 HYPOTHESIS_PROFILE=few
MAPS := entmax-3 or entmax-tensor or normmax-5 or k_subsets-2.5 or constrained_softmax
BRIEFLY := not second and not every_order and not bad_input and not (entmax-tensor and finite)
HARNESS := "not thousands and not compile and not second_order and (entmax-1.5 or (($(MAPS)) and $(BRIEFLY)) or (compiled and (near_ties or the_loss)))"
test-triton: setup  ## run the kernels for GPUs in Triton's interpreter
	@$(ON_TRITON) $(BIN)/python -m pytest -q -n 2 --dist worksteal tests/gpu
	@$(ON_TRITON) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" -k $(HARNESS) tests/test_conformance.py tests/regularizers/test_accuracy.py

gpu-report: setup  ## compile the kernels for GPUs ahead of time and write docs/gpu.md anew; minutes
	@FENCHEL_KERNELS=triton $(BIN)/python lab/gpu_report.py docs/gpu.md

check: setup  ## lint, format, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# Kernels are tested as the machine compiles them; on a machine with AVX-512 this tests them as a machine without it would.
AS_AVX2 := import sys; from fenchel_lab.bench import targets; sys.exit(targets.run_as_avx2(sys.argv[1:]))
check-targets: setup  ## run the tests of maps and losses compiled for AVX2, on a machine with AVX-512
	@$(BIN)/python -c "$(AS_AVX2)" $(BIN)/python -m pytest -q -n 2 -m "not slow" \
		tests/kernels tests/test_conformance.py tests/test_loss*.py tests/regularizers

# Not part of continuous integration: each installs another torch, with several gigabytes of libraries for GPUs.
OLDEST := .venv-oldest
NEWEST := .venv-newest
VERSIONS := tests/test_conformance.py tests/test_loss*.py tests/regularizers tests/streaming
define TRY
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2) -e . pytest pytest-xdist hypothesis mpmath cvxpy
	@$(1)/bin/python -m pytest -q -n 2 $(VERSIONS)
endef
check-oldest:  ## run the tests of maps, losses and attention with the oldest versions that are allowed
	$(call TRY,$(OLDEST),-c constraints-oldest.txt)

check-newest:  ## the same with the newest versions that can be had
	$(call TRY,$(NEWEST),--upgrade --upgrade-strategy eager)

bench: $(BENCH_STAMP)  ## measure against peers; ratios in one run, kept in report/bench
	@$(BIN)/fenchel bench --out report/bench

clean:  ## remove the environment and what was generated
	rm -rf $(VENV) $(OLDEST) $(NEWEST) report build dist lab/build lab/dist docs/gallery/pages docs/reference/rooms
