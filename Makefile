# Two commands do everything: `make run` (the main job) and `make test`. Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: run test check gpu-test records setup clean

run: setup
	$(BIN)/whet optimize tiny-llama:small

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check whet tests
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

gpu-test: setup
	$(BIN)/python -m pytest -m gpu

setup: $(VENV)/.ready

# A marker newer than what it was made from: setup costs nothing the second time.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch triton
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) whet.lock
