# clearhead: every target sets up what it needs by itself, in .venv, and sets up nothing the second time.

PYTHON ?= python3
PIP = python -m pip --disable-pip-version-check
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml)
EDITABLES := $(foreach project,$(PROJECTS),-e ./$(dir $(project)))
TYPED := src $(wildcard packages/*/src packages/*/train)

# Two processes, as CI has two cores (WORKERS=n for more); each keeps to one thread, or they would fight for them. A file
# goes to one process: its tests share explanations that are made once.
WORKERS ?= 2
DEVICE ?= cpu
PYTEST = OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	$(1)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(2) $(ARGS)

# The tests that run with shape annotations checked (tests/shape_checks.py), which costs about a third of their time: a
# run of their own. Both runs take place, even if the first fails. NO_TESTS: pytest's exit status where ARGS selects none.
SHAPE_CHECKED := tests/methods tests/capture tests/interventions tests/backward_rules
NO_TESTS := 5

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-oldest test-gpu golden lint format bench bench-gpu known-answers claim leaderboard probes notebooks \
	docs architectures fresh lock clean setup

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: .venv/.stamp ## explain a sentence and an image in the terminal, and write demo.html
	.venv/bin/python examples/demo.py

test: .venv/.stamp ## the tests (ARGS="-k name" to choose some)
	@scripts/chromium.sh
	@status=0; \
	CLEARHEAD_SHAPE_CHECKS=1 $(call PYTEST,.venv,$(SHAPE_CHECKED)) || test $$? -eq $(NO_TESTS) || status=1; \
	$(call PYTEST,.venv,tests $(SHAPE_CHECKED:%=--ignore=%)) || test $$? -eq $(NO_TESTS) || status=1; \
	exit $$status

test-slow: .venv/.stamp ## the slow tests only: fuzzing, soak, coverage of architectures, accuracy of the zoo
	@scripts/chromium.sh
	$(call PYTEST,.venv,-m slow --dist load)

test-oldest: .venv-oldest/.stamp ## the tests on the oldest supported transformers
	@scripts/chromium.sh
	$(call PYTEST,.venv-oldest,)

test-gpu: .venv/.stamp ## the tests that need a GPU: compiled Triton kernels, and torch's own
	.venv/bin/python -m pytest -m gpu tests/capture/kernels/test_triton_reductions.py tests/capture/kernels/test_triton_backward.py \
		tests/methods/test_lrp.py $(ARGS)

golden: .venv/.stamp ## write the golden files of tests/golden, after an intended change of behaviour
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false .venv/bin/python -m tests.golden.write

lint: .venv/.stamp ## ruff (rules and format) and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m mypy $(TYPED)

format: .venv/.stamp ## apply ruff's fixes and format
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: .venv/.stamp ## cost of explanations relative to a plain pass, the reference implementation and other libraries
	.venv/bin/python benchmarks/performance.py --device cpu --json benchmarks/results/cpu.json
	.venv/bin/python benchmarks/compiled_tiles.py
	.venv/bin/python benchmarks/generated_tokens.py
	.venv/bin/python benchmarks/shap_batches.py
	.venv/bin/python benchmarks/memory_budget.py --inputs 32
	.venv/bin/python benchmarks/permutations.py
	.venv/bin/python benchmarks/perturbation.py --pictures 4 --chunk 1
	.venv/bin/python benchmarks/densray.py

bench-gpu: .venv/.stamp ## explanations and kernels on a CUDA GPU
	.venv/bin/python benchmarks/performance.py --device cuda --json benchmarks/results/gpu.json
	.venv/bin/python benchmarks/performance_kernels.py --json benchmarks/results/gpu-kernels.json

known-answers: .venv/.stamp ## every method on every known-answer model: cards and docs/known-answers.md (an hour)
	for model in logic:100 recall:60 spell:60 shapes-vqa:60 shapes-vilt:60 shapes-detr:30 pets-hans:24; do \
		.venv/bin/python benchmarks/truth.py --models $${model%:*} --count $${model#*:} \
			--json build/truth/$${model%:*}.json || exit 1; done
	.venv/bin/python packages/zoo/train/known_answers.py --from build/truth/*.json

claim: .venv/.stamp ## the registered claim: train the other seeds, measure all methods, docs/claim-results.md (DATA=folder; hours; resumable)
	.venv/bin/python benchmarks/claim.py train --parallel $(WORKERS) --device $(DEVICE) $(if $(DATA),--data $(DATA))
	.venv/bin/python benchmarks/claim.py measure --parallel $(WORKERS) --device $(DEVICE) $(if $(DATA),--data $(DATA))
	.venv/bin/python benchmarks/claim.py page

leaderboard: .venv/.stamp ## every method on the zoo: docs/leaderboard.md (hours on a CPU; resumable)
	.venv/bin/python benchmarks/leaderboard.py run --data ../shared/data $(ARGS)
	.venv/bin/python benchmarks/leaderboard.py tables

probes: .venv/.stamp ## every probe of attention on three zoo models and a BiLSTM: docs/attention-on-trial.md (hours on a CPU)
	.venv/bin/python benchmarks/probes.py $(ARGS)
	.venv/bin/python benchmarks/probes_page.py

notebooks: .venv/.stamp ## execute the notebooks of examples/ again
	.venv/bin/python examples/notebooks/make.py

docs: .venv/.stamp ## write the pages that are generated from the code
	.venv/bin/python -m clearhead.methods.catalogue > docs/methods.md

architectures: .venv/.stamp ## try the model classes of transformers, and write docs/architectures.md (minutes)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 .venv/bin/python -m tests.architectures.table --workers $(WORKERS)

fresh: ## clone this commit into an empty folder, then run make demo and make test there
	@scripts/fresh.sh

lock: ## rewrite both lock files from pyproject.toml
	PYTHON="$(PYTHON)" scripts/lock.sh requirements.lock
	PYTHON="$(PYTHON)" scripts/lock.sh requirements-oldest.lock transformers==5.0.0

clean: ## remove environments, caches and build output
	rm -rf .venv .venv-oldest dist packages/*/dist demo.html .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

setup: .venv/.stamp ## only the environment

.venv/.stamp: requirements.lock $(PROJECTS)
.venv-oldest/.stamp: requirements-oldest.lock $(PROJECTS)

# torch goes in first and alone: whatever comes after finds it there and asks for no other build of it.
# The projects themselves go in last, without dependencies, built with the lock's own hatchling.
.venv/.stamp .venv-oldest/.stamp:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "clearhead needs Python 3.11 or newer; this is " \
		+ sys.version.split()[0] + ". Say which: make PYTHON=/path/to/python3.11")'
	@echo "setting up $(@D) from $< (minutes the first time, torch among it)"
	test -x $(@D)/bin/python || "$(PYTHON)" -m venv $(@D)
	$(@D)/bin/$(PIP) install -qq "$$(grep '^torch==' $<)"
	$(@D)/bin/$(PIP) install -qq -r $<
	$(@D)/bin/$(PIP) install -qq --no-deps --no-build-isolation $(EDITABLES)
	@touch $@
