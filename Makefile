# Every target builds .venv first when it is missing or older than setup.py.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH_STAMP := $(VENV)/.installed-torch

.PHONY: venv demo test check test-extra bench plan clean

venv: $(STAMP)

$(STAMP): setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: Python 3.11 or newer is needed; install it or name one with 'make $(MAKECMDGOALS) PYTHON=python3.12'" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The reference implementation that tests marked `torch` compare with.
$(TORCH_STAMP): $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	touch $@

demo: $(STAMP)
	$(RUN) launch/train.py --config=configs/pocket.py:demo

test: $(STAMP)
	$(RUN) -m pytest -n 2 -m 'not torch'

check: $(STAMP)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

# Here a skipped test is a failed test: nothing may hide behind a missing package.
test-extra: $(TORCH_STAMP)
	INTRASKILL_NO_SKIPS=1 $(RUN) -m pytest -n 2 -m torch -rs

bench: $(STAMP)
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(RUN) "$$script"; done

# Needs libtpu (pip install '.[plan]'), 8 GB and a quarter of an hour on two quiet cores. A machine that a plan does not fit is a result, hence the `-`.
plan: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[plan]'
	-for machine in v5p:2x2x2 v6e:4x4 v5e:4x8 v5e:4x4 h100:8; do $(RUN) launch/plan.py --topology=$$machine --write=docs/plan.md; done

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
