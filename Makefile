# make demo | test | soak | lint: each sets up .venv first if that is missing or out of date.
# PYTHON=python3.12 selects the interpreter, PYTEST_ARGS="-k name" is for pytest.

VENV := .venv
BIN := $(VENV)/bin
# A .venv that is there is kept, unless another PYTHON is asked for.
PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
PRINT_VERSION := import sys; print("%d.%d.%d" % sys.version_info[:3])
VERSION := $(shell $(PYTHON) -c '$(PRINT_VERSION)')

# The stamp's name changes with whatever the set-up depends on: the interpreter, the
# pins, the package's description and the recipe of Horovod's build.
INPUTS := requirements.txt setup.py $(wildcard kerasmgpu/horovod_*.py)
STAMP := $(VENV)/.kerasmgpu-$(VERSION)-$(shell cat $(INPUTS) | cksum | cut -d' ' -f1)

PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# Open MPI, pytest and the examples look programs up in PATH.
RUN := PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONUNBUFFERED=1

.PHONY: help setup demo test soak lint clean

help:
	@sed -n '1,2s/^# //p' Makefile

setup: $(STAMP)

$(STAMP):
	@test -n "$(VERSION)" || { echo "cannot run PYTHON=$(PYTHON)" >&2; exit 1; }
	@if [ "$$($(BIN)/python -c '$(PRINT_VERSION)' 2>&1)" != "$(VERSION)" ]; then \
	  echo "== making $(VENV) with Python $(VERSION)"; \
	  rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); \
	fi
	@echo "== installing requirements.txt"
	@$(PIP) install -r requirements.txt
	@echo "== installing kerasmgpu (editable) and Horovod"
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@$(BIN)/kerasmgpu install-horovod
	@rm -f $(VENV)/.kerasmgpu-*
	@touch $@

demo: $(STAMP)
	$(RUN) kerasmgpu run -np 2 -- python examples/mnist.py

test: $(STAMP)
	$(RUN) pytest $(PYTEST_ARGS)

soak: $(STAMP)
	$(RUN) pytest -m soak $(PYTEST_ARGS)

lint: $(STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
