# SPDX-License-Identifier: Apache-2.0
# One command for each thing a newcomer does. `make` alone lists them.

# The first Python of ours that really runs (a version manager's shim may be on PATH and not work).
SUPPORTED := python3.11 python3.12 python3.13 python3.14 python3 python
PYTHON ?= $(shell for name in $(SUPPORTED); do \
	"$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null && echo "$$name" && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Images of containers set it. Then every worker of pytest rewrites 500 test files again (17 s of a core instead of 7
# before its first test), and every program that a test starts compiles all of our modules.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup debian helm rewritten lint test test-unit test-processes processes-beside test-matrix test-versions fuzz sbom audit locked demo docs clean

help:
	@echo "make setup           virtual environment in $(VENV) with everything for development"
	@echo "make demo            train on this machine, break it, and watch it recover (about 30 s)"
	@echo "make test            lint, types, floors and the tests that need no GPU"
	@echo "make lint            ruff, mypy, import-linter only"
	@echo "make test-unit       tests that start no processes of their own"
	@echo "make test-processes  tests with real processes, about 10 minutes"
	@echo "make test-matrix     the rest of the fault matrix, the variants that make test leaves out, and all that takes turns there, about an hour"
	@echo "make test-versions   the releases of Python, torch and Triton that are supported, one environment each; some 25 GB, 40 minutes"
	@echo "make fuzz            200 times as many drawn inputs for readers of foreign bytes and the HTTP API, about 20 minutes"
	@echo "make docs            the documentation site, into build/site"
	@echo "make sbom            what a user installs with us, as dist/megascale-ops.cdx.json (CycloneDX)"
	@echo "make audit           known vulnerabilities of what is installed; asks pypi.org"
	@echo "make locked          what pip would install here now, with hashes, as dist/locked.txt"
	@echo "make clean           remove $(VENV) and all caches"

setup: $(STAMP)

# Of the files of 183 packages four fifths are imported by nobody. What can't be compiled (syntax of a newer Python, in
# tests of torch) can't be imported either.
COMPILED_WHEN_WANTED := /tests?/|/testing/|/(transformers/models|moto|plotly|sympy|networkx|pip|setuptools|torch/(_inductor|onnx|ao)|kubernetes/aio|mypyc?|pygments/(lexers|styles))/

$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "MegaScale Ops needs Python 3.11 to 3.14, $(if $(PYTHON),and there is no $(PYTHON),and none was found): install one, or name it with make PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; (3, 11) <= sys.version_info[:2] < (3, 15) or sys.exit("MegaScale Ops needs Python 3.11 to 3.14; $(PYTHON) is " + sys.version.split()[0] + ": name another one with make PYTHON=/path/to/python")'
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python .ci/install.py -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 2 -x '$(COMPILED_WHEN_WANTED)' $(VENV)/lib/python*/site-packages || true
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/licences.py

# pip uses one core and dpkg the other; then linters, unit tests and processes have both. Processes wait for a quarter of
# their time, which unit tests don't. What is about time comes last, when nothing else runs.
test:
	@echo "set-up, lint, unit tests and processes, side by side where they can be, some minutes: each prints what it has to say at its end"
	@$(MAKE) --no-print-directory -j4 --output-sync=target UNIT_TESTS_AFTER=debian lint test-unit processes-beside
	@.ci/process-tests.sh last

debian:
	@.ci/apt.sh gcc libc6-dev postgresql procps chromium prometheus prometheus-alertmanager systemd shellcheck openssl util-linux iproute2 slurmctld slurmd slurm-client munge openmpi-bin openssh-server openssh-client

# By pip, and for tests of processes alone.
helm: setup
	@.ci/helm.sh >/dev/null || true

# Eight workers begin together, and in a fresh clone all would rewrite the same asserts: 28 s of CPU where once is 8.
rewritten: setup
	@$(BIN)/python .ci/rewrite_tests.py >/dev/null

test-unit: setup rewritten $(UNIT_TESTS_AFTER)
	@.ci/unit-tests.sh

test-processes: setup rewritten
	@.ci/process-tests.sh

processes-beside: setup rewritten debian helm
	@.ci/process-tests.sh beside

# Where drawn inputs are no tests of their own, all of them instead of a quarter.
test-matrix: setup
	@.ci/apt.sh slurmdbd mariadb-server
	$(BIN)/pytest tests -m "matrix or in_turn"
	MEGASCALE_ALL_DRAWN=1 $(BIN)/pytest tests/properties tests/unit/controller/test_journal_damage.py tests/unit/controller/test_wild_messages.py

# In an environment of its own: uv keeps each file once for all environments that it makes.
test-versions: setup
	"$(PYTHON)" -m venv .venv-versions
	.venv-versions/bin/pip install --quiet --disable-pip-version-check uv
	UV=.venv-versions/bin/uv $(BIN)/python .ci/versions.py $(if $(ONLY),--only $(ONLY) build/versions.txt,benchmarks/results/versions.txt)

# A failure prints the input and the line that makes it again; .hypothesis remembers it for the next run.
fuzz: setup
	MEGASCALE_FUZZ_EXAMPLES=12000 $(BIN)/pytest tests/fuzz -n 2 --durations=10

# Material announces its successor with each build; CONTRIBUTING.md tells of it.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

sbom: setup
	$(BIN)/python .ci/sbom.py dist/megascale-ops.cdx.json

# In an environment of its own: it would draw a dozen packages into ours.
audit: setup
	"$(PYTHON)" -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit --progress-spinner off $(foreach path,$(wildcard $(VENV)/lib/python*/site-packages),--path $(path))

locked: setup
	@mkdir -p dist
	$(BIN)/pip install --disable-pip-version-check --dry-run --ignore-installed --quiet --report - -c constraints.txt '.[controller,store]' | $(BIN)/python .ci/locked.py > dist/.locked.txt
	mv dist/.locked.txt dist/locked.txt

demo: setup
	$(BIN)/megascale-ops demo

clean:
	rm -rf $(VENV) .venv-audit .venv-versions .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage dist build
