# `make help` lists the targets. `VENV=` (empty) uses the current interpreter and
# installs nothing, for machines that already hold everything and have no network.
PYTHON ?= python3
VENV ?= .venv
ifeq ($(VENV),)
PY := $(PYTHON)
READY :=
# Nothing is installed there: the scripts in examples/ find the packages here.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt -e ".[test]"
	touch $@
endif
# The type-checking hook needs beartype; a machine without it runs the tests unhooked.
TYPES = $(shell $(PY) -c "import beartype, jaxtyping" 2>/dev/null && echo --jaxtyping-packages=jax_fp8,torch_ref,beartype.beartype)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup parity parity-multi train test test-all lint types bench mirror docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create $(VENV) and install what the other targets need, once

parity: $(READY)  ## both packages, the recordings and the controls, compared
	$(PY) -m parity_tests $(ARGS)

parity-multi: $(READY)  ## all GPUs of this machine against one (ARGS=--cpu: 8 host devices)
	$(PY) examples/multi_gpu.py $(ARGS)

test: $(READY)  ## the tests, with doctests, shape checks and coverage
	$(PY) -m pytest -n 2 --dist loadfile -m "not slow" --cov --cov-report=term $(TYPES) $(ARGS)

test-all: $(READY)  ## the slow tests too
	$(PY) -m pytest -n 2 --dist loadfile $(TYPES) $(ARGS)

train: $(READY)  ## a language model in BF16, FP8 and FP8 with recompute, compared
	$(PY) examples/train_lm.py --mode bf16 --mode fp8 --mode fp8-remat $(ARGS)

bench: $(READY)  ## speed and memory beside the peers
	$(PY) -m benchmarks $(ARGS)

mirror: $(READY)  ## the file-by-file difference of the two packages
	$(PY) -m parity_tests.mirror $(ARGS)

lint: $(READY)  ## ruff: rules and format
	$(PY) -m pip install -q ruff && $(PY) -m ruff check . && $(PY) -m ruff format --check .

types: $(READY)  ## pyright
	$(PY) -m pip install -q "pyright[nodejs]" && $(PY) -m pyright --pythonpath $(PY)

docs: $(READY)  ## the documentation site, warnings are errors
	$(PY) -m pip install -q -c constraints.txt -e ".[docs]" && $(PY) -m mkdocs build --strict

clean:  ## remove .venv, caches and reports
	rm -rf .venv build dist site .pytest_cache .ruff_cache .coverage* parity_report.* parity_scales.png
