# Every target makes .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
COMPILE = { $(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing/_internal|transformers/models)/' $(VENV)/lib || true; }
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard src/phalanx/collectives/native/*.[ch])

# Thousands of processes import the same modules: compile them once, whatever the shell of the user says.
export PYTHONDONTWRITEBYTECODE :=
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: demo test test-all fuzz chaos check docs pictures faithful gpu-test dist clean

# Needs only phalanx and its dependencies, so it does not wait for what tests need.
demo: $(if $(wildcard $(VENV)/ready),$(VENV)/ready,$(VENV)/base)
	@$(BIN)/phalanx demo

# What a contributor runs: unit tests, and real runs on this host. tests/kit/tiers.py decides which. Four processes fill
# two cores, because tests wait in between.
test: $(VENV)/ready
	@$(BIN)/python -m pytest -n 4 --dist loadgroup -m "not alone and not extended"

# All tests: with namespaces, Slurm, MPI, Chromium, sanitizers, torch's own suite and torchrun. No test gets a second try.
# Four processes keep two cores busy. More would only make tests with time limits fail.
test-all: $(VENV)/ready
	@$(BIN)/python -m pytest -n 4 --dist loadgroup -m "not alone"
	@$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

# Every kind of script under torchrun and under phalanx: the same exit code, output, files and numbers.
faithful: $(VENV)/ready
	@$(BIN)/python -m tests.faithful

# On a machine with an NVIDIA GPU: several NCCL ranks, on MIG slices where they can be made, else on a shared GPU.
gpu-test: $(VENV)/ready
	@$(BIN)/python -m tests.gpu

# Generated input for everything that phalanx reads from others: 100,000 cases, the same every time. `make test` runs a
# tenth of them. Another seed: make fuzz SEED=2
SEED ?= 1
fuzz: $(VENV)/ready
	@$(BIN)/python -m tests.fuzz --seed $(SEED)

# 1,000 faults in real runs, each checked against an undisturbed run: about an hour on 2 cores. `make test-all` runs a
# tenth of them. A part: make chaos FAULTS=100; one kind: make chaos KIND=store
chaos: $(VENV)/ready
	@$(BIN)/python -m tests.chaos --seed $(SEED) $(if $(FAULTS),--faults $(FAULTS)) $(if $(KIND),--kind $(KIND))

check: $(VENV)/ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# The site, in build/site: it works from disk. A broken link is an error.
docs: $(VENV)/docs
	@$(BIN)/python -m tools.reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo build/site/index.html

# The pictures of the documentation, from real runs: needs Chromium, takes some minutes.
pictures: $(VENV)/ready
	@$(BIN)/python -m benchmarks.pictures docs/pictures

# An sdist, a wheel that is built from it, and both checked: metadata, contents, demo and quick tests in new environments,
# with every Python of PYTHONS that is installed.
PYTHONS ?= python3.11 python3.12 python3.13
dist: $(VENV)/ready
	@.ci/wheel $(PYTHONS)

# Phalanx with its dependencies.
$(VENV)/base: $(SOURCES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"phalanx needs Python 3.11 or newer, {sys.executable} is {v.major}.{v.minor}: make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once)"
	@$(BIN)/python -m pip install --quiet --no-compile torch --editable .
	@touch $@

# And with what tests and tools need. pip would compile on one core, and modules that nothing imports. Continuous
# integration adds the extra docs here: that saves building phalanx once more.
EXTRAS ?= dev
$(VENV)/ready: $(SOURCES) | $(if $(wildcard $(VENV)/ready),,$(VENV)/base)
	@echo "installing what tests need (once)"
	@$(COMPILE) & $(BIN)/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]' && wait && $(COMPILE)
	@touch $@

$(VENV)/docs: $(VENV)/ready
	@$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) build dist
