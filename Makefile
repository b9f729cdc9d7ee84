# Every target builds .venv first when it is missing or older than setup.py.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH_STAMP := $(VENV)/.installed-torch

SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed

.PHONY: venv demo test check test-extra test-sglang bench clean

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

$(SGLANG_STAMP): tests/sglang_cpu/install.sh tests/sglang_cpu/requirements.txt $(wildcard tests/sglang_cpu/stand_ins/*.py tests/sglang_cpu/stand_ins/*/*.py)
	bash tests/sglang_cpu/install.sh $(SGLANG_VENV) $(PYTHON)
	touch $@

# A real SGLang on the CPU: 3.5 GB, minutes to install, 4 GB of memory. Writes its figures into docs/rollout.md.
test-sglang: $(STAMP) $(SGLANG_STAMP)
	INTRASKILL_SGLANG=$(CURDIR)/$(SGLANG_VENV) INTRASKILL_NO_SKIPS=1 $(RUN) -m pytest -n 0 --timeout=3600 tests/rollout/test_engine_contract.py tests/sglang_cpu

bench: $(STAMP)
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(RUN) "$$script"; done

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
