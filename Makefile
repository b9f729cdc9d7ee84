# Every target builds .venv first when it is missing or older than setup.py.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
EXTRA_STAMP := $(VENV)/.installed-extra
EXTRA_MARKERS := torch or bench or chromium or wandb

SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed

.PHONY: venv demo test check test-extra test-sglang bench plan chromium clean

venv: $(STAMP)

$(STAMP): setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: Python 3.11 or newer is needed; install it or name one with 'make $(MAKECMDGOALS) PYTHON=python3.12'" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The reference implementation that tests marked `torch` compare with, and what those marked `bench`, `chromium` and `wandb` need.
$(EXTRA_STAMP): $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[dev,bench,browser,wandb]'
	touch $@

# Debian's browser and its driver; as root, or with sudo.
chromium:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	  command -v apt-get >/dev/null || { echo "chromium and chromedriver not found: install them, they drive the tests of the shop's page" >&2; exit 2; }; \
	  as=$$([ "$$(id -u)" = 0 ] || echo sudo); $$as apt-get update -q && $$as apt-get install -y -q --no-install-recommends chromium chromium-driver; }

demo: $(STAMP)
	$(RUN) launch/train.py --config=configs/pocket.py:demo

test: $(STAMP)
	$(RUN) -m pytest -n 2 -m 'not ($(EXTRA_MARKERS))'

check: $(STAMP)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports

# Here a skipped test is a failed test: nothing may hide behind a missing package.
test-extra: $(EXTRA_STAMP) chromium
	INTRASKILL_NO_SKIPS=1 $(RUN) -m pytest -n 2 -m '$(EXTRA_MARKERS)' -rs

$(SGLANG_STAMP): tests/sglang_cpu/install.sh tests/sglang_cpu/requirements.txt $(wildcard tests/sglang_cpu/stand_ins/*.py tests/sglang_cpu/stand_ins/*/*.py)
	bash tests/sglang_cpu/install.sh $(SGLANG_VENV) $(PYTHON)
	touch $@

# A real SGLang on the CPU: 3.5 GB, minutes to install, 4 GB of memory. Writes its figures into docs/rollout.md.
test-sglang: $(STAMP) $(SGLANG_STAMP)
	INTRASKILL_SGLANG=$(CURDIR)/$(SGLANG_VENV) INTRASKILL_NO_SKIPS=1 $(RUN) -m pytest -n 0 --timeout=3600 tests/rollout/test_engine_contract.py tests/sglang_cpu

bench: $(EXTRA_STAMP)
	@set -e; for script in benchmarks/bench_*.py; do echo "== $$script"; $(RUN) "$$script"; done

# Needs libtpu (pip install '.[plan]'), 8 GB and a quarter of an hour on two quiet cores. A machine that a plan does not fit is a result, hence the `-`.
plan: $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[plan]'
	-for machine in v5p:2x2x2 v6e:4x4 v5e:4x8 v5e:4x4 h100:8; do $(RUN) launch/plan.py --topology=$$machine --write=docs/plan.md; done

clean:
	rm -rf $(VENV) $(SGLANG_VENV) .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
