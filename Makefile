# The commands of this project. Each makes .venv when it is missing; nothing but Python 3.11 is needed.
PYTHON ?= python3
BIN := .venv/bin
CPUS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export NO_MKDOCS_2_WARNING = 1

.PHONY: demo serve report test check docs prove clean

demo: .venv/ready
	$(BIN)/foretoken generate --show-tokens --compare --temperature 0.6 --seed 4 "The old house stood at the end of the lane, and"

serve: .venv/ready
	$(BIN)/foretoken serve

# The quick report: the pair that ships, and the translation ladder where it is there
report: .venv/ready
	$(BIN)/foretoken report --quick --out build/report recipes/default.toml $(patsubst models/%/target/config.json,recipes/%.toml,$(wildcard models/translation/target/config.json))

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(CPUS) -m "not prove"

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pytest -q tests/unit/test_layers.py tests/unit/docs
	$(BIN)/mkdocs build --strict

docs: .venv/ready
	$(BIN)/typer foretoken.cli utils docs --name foretoken --title "Command line" --output docs/cli.md
	$(BIN)/mkdocs build --strict
	@echo build/site/index.html

prove: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(CPUS) --dist worksteal -m prove -rA --show-capture=no | grep -E "%]$$|^(PASSED|FAILED|ERROR)|passed" | tee benchmarks/results/prove.txt

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv
