# up: the whole mesh on the bundled demo model (make up ARGS="--decode 2")
# test: every test.  check: style, types, walls, then the quick tests.
# bench: every benchmark, then one table and one picture of all figures that are kept.
# Each of them makes .venv first, when something it is made from has changed.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BENCH ?= bench_*
BIN := $(VENV)/bin
STAMP := $(VENV)/.pagemesh-stamp
NATIVE := $(shell find kernels -name '*.[ch]' -o -name '*.cpp' -o -name '*.hpp' \
	-o -name 'CMakeLists.txt' -o -name 'build_native.py')

.PHONY: up test check bench set-up
.DEFAULT_GOAL := up

up: $(STAMP)
	@exec $(BIN)/pagemesh up $(ARGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose.yaml ops/docker/compose.tls.yaml
	$(BIN)/hadolint --config ops/docker/hadolint.yaml ops/docker/Dockerfile
	@if command -v promtool > /dev/null; \
		then promtool check config --lint=all ops/prometheus/prometheus.yml \
			&& promtool test rules ops/prometheus/alerts_test.yml; \
		else echo "promtool is not installed: the Prometheus files were not checked by it"; fi
	@$(BIN)/python -m pytest -q -m "not slow" tests/unit tests/machine tests/test_tidy.py

bench: $(STAMP)
	@failed=; for script in ops/bench/$(BENCH).py; do \
		module=ops.bench.$$(basename $$script .py); \
		echo "== $$module"; $(BIN)/python -m $$module $(ARGS) || failed="$$failed $$module"; done; \
	echo "== ops.bench.summary"; $(BIN)/python -m ops.bench.summary || exit 1; \
	if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

set-up: $(STAMP)

$(STAMP): pyproject.toml ops/constraints.txt ops/set_up.py $(NATIVE)
	@$(PYTHON) ops/set_up.py $(VENV)
	@touch $@
