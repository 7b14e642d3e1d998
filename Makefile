# `make demo` and `make test` each take a fresh machine (Python 3.11+ and pip)
# from a clone to the result.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUN ?= runs/demo
SEED ?= 0

.PHONY: demo test test-slow lint weights clean

$(INSTALLED): setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev,code]'
	touch $@

weights: $(INSTALLED)
	$(BIN)/python -m gdpo_jax.policy.weights smollm2-135m

# Trains SmolLM2-135M-Instruct with GDPO on two rewards: about ten minutes on
# two CPU cores. Killed and started again, it goes on where it was.
demo: weights
	$(BIN)/python experiments/math_len.py \
	  --config=experiments/configs/math_len.py \
	  --config.seed=$(SEED) --run_dir=$(RUN)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Everything but what needs minutes; the tests on real weights are skipped,
# with the reason, where the weights are not there (`make weights`).
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

# Kill tests, soaks and whole-data checks; pytest's --lf resumes after a failure.
test-slow: weights
	$(BIN)/python -m pytest --slow -m slow

clean:
	rm -rf $(VENV) build *.egg-info
