# make demo      set up .venv; pre-train a small model, then RFT and reinforcement learning on the shipped one, on this machine
# make test      set up .venv and run every check and the tests (what CI runs)
# make slow      the tests that take longest
# make check     format, lint, types, import contracts
# make kernels   compile every Triton kernel for Hopper and Ampere, and run updates and decode steps on a pretended GPU
# make fuzz      attack every reader with random input for some minutes
# make numerics  the tests of numerics on six instruction sets, as other CPUs would run them
# make timing    the tests that watch a real clock; wants a quiet machine
# make gpu-test  the tests that need a CUDA device
# make claims    the tuning guides' claims measured on this machine: writes the tables of docs/claims.md
# make format    rewrite the sources in the house format

PYTHON ?= python3
BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# integration tests come first in the alphabet and take longest: so no worker is left with a long file at the end
NUMERICS = $$(grep -rl --include='test_*.py' numerics tests)
PIP := PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-compile
# --no-compile: pip would compile on one core, which takes half of the set-up. Python compiles what it imports, and keeps it,
# even where the environment says otherwise; for the tests, which import torch a hundred times, all is compiled on all cores
unexport PYTHONDONTWRITEBYTECODE

# In a folder of its own: all other tests run as torch for CPUs is installed, without Triton. Not in constraints.txt: torch
# for CUDA asks for a version of its own.
TRITON := triton==3.6.0

.PHONY: demo test check kernels slow numerics timing fuzz gpu-test claims format clean

.venv/core: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "installing redline and torch into .venv (a minute or two)"
	$(PIP) --editable .
	@touch $@

.venv/dev: .venv/core
	@echo "installing what the tests need (a minute or two)"
	$(PIP) --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # some packages hold templates that are no Python
	@touch $@

.venv/triton: Makefile | .venv/dev
	@echo "installing Triton, to compile our kernels with (some seconds)"
	rm -rf $@
	$(PIP) --no-deps --target $@ $(TRITON)
	@touch $@

demo: .venv/core
	rm -rf runs/demo runs/demo-rft runs/demo-rl
	$(BIN)/redline machine
	$(BIN)/redline train nano --run runs/demo --set train.steps=200
	$(BIN)/redline generate runs/demo --checkpoint best --prompt "ROMEO:" --max-new-tokens 80
	@echo
	$(BIN)/redline evaluate runs/demo --checkpoint best
	@echo "the run folder is runs/demo: recipe.toml says what, plan.json how and why, metrics.jsonl what happened"
	@echo
	@echo "now rejection-sampling fine-tuning: sample answers, keep the verified ones, train on them, test on held-out questions"
	$(BIN)/redline rft run rft/demo --run runs/demo-rft
	@echo
	@echo "now reinforcement learning on the shipped model: it learns from the rewards of its own answers"
	$(BIN)/redline rl run rl/demo --run runs/demo-rl
	@echo
	@echo "what held the pre-training back, and each run on a page"
	$(BIN)/redline diagnose runs/demo
	$(BIN)/redline report runs/demo --out runs/demo/report.html > runs/demo/report.txt
	$(BIN)/redline report runs/demo-rft --out runs/demo-rft/report.html > runs/demo-rft/report.txt
	$(BIN)/redline report runs/demo-rl --out runs/demo-rl/report.html > runs/demo-rl/report.txt
	@echo "open report.html in runs/demo, runs/demo-rft and runs/demo-rl in a browser (the same as text: report.txt next to it)"

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Numerics run once, under instructions that most CPUs do not default to; `make numerics` runs them under all.
test: check kernels
	$(PYTEST) $(PARALLEL) --ignore tests/kernels -m 'not numerics and not slow and not timing'
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(PARALLEL) -m 'numerics and not slow' $(NUMERICS)

kernels: .venv/dev .venv/triton
	PYTHONPATH=.venv/triton $(PYTEST) tests/kernels

slow: .venv/dev
	$(PYTEST) $(PARALLEL) -m 'slow and not timing'

numerics: .venv/dev
	for aten in default avx2 avx512; do for onednn in AVX2 AVX512_CORE; do \
		echo "$$aten $$onednn"; \
		ATEN_CPU_CAPABILITY=$$aten ONEDNN_MAX_CPU_ISA=$$onednn $(PYTEST) $(PARALLEL) -m numerics $(NUMERICS) || exit 1; \
	done; done

timing: .venv/dev
	$(PYTEST) -m timing

fuzz: .venv/dev
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest tests/fuzz --timeout 1800

# Four processes share the GPU; the tests that fill its memory come after them, alone.
gpu-test: .venv/dev
	$(BIN)/pytest tests/gpu --ignore tests/gpu/test_tune_gpu.py -n 4 --dist loadfile --durations=15
	$(BIN)/pytest tests/gpu/test_tune_gpu.py

claims: .venv/dev
	@mkdir -p runs
	for seed in 000 001 002 003 004; do \
		$(BIN)/redline ablate seeds/$$seed --minutes 10 --markdown > runs/claims-$$seed.md || exit 1; \
	done
	sed '/<!-- tables -->/q' docs/claims.md > runs/claims.md
	cat runs/claims-00?.md >> runs/claims.md && mv runs/claims.md docs/claims.md

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs
