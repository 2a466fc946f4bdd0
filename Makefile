# make demo   from nothing to a trained X-gram model beside its vanilla twin
# make test   all tests (lint, types, pytest, jobs on a Slurm of its own)
# make test-fast  lint, types, unit and parity tests (under 5 minutes); several ranks, goldens, kills and Slurm are left out
# make serving  the environment of vLLM; make test-serving  tests of the served model in it
# make titan  the environment of torchtitan, and the example with its Llama on two ranks
# make soak   runs that are killed KILLS=60 times, everywhere, on Slurm too; 200 take half an hour to an hour
# make fuzz   100,000 damaged and odd files for the readers (a minute)
# make dist   the source archive and the wheel, in dist/; make test-package  the wheel in an environment of its own
# make golden writes the file of this kind of CPU in tests/golden/goldens anew (some minutes)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
KILLS ?= 60
RUN := $(BIN)/xgram-dist

.PHONY: demo test test-fast slurm soak fuzz golden lint lock peers reference clean serving test-serving titan dist test-package

.venv/installed: requirements.lock pyproject.toml
	@echo "== environment in .venv (a few minutes, once)"
	$(PYTHON) -m venv --clear .venv
	$(BIN)/pip install --disable-pip-version-check --no-deps -r requirements.lock
	$(BIN)/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: .venv/installed
	@echo "== 1/5 documents -> tokenizer -> shards: the text every Python installation has"
	$(RUN) prepare --train-bpe 4096 --chunk-tokens 1024 --validation 0.03 --out data/demo
	@echo "== 2/5 token frequencies"
	$(RUN) frequencies data/demo --vocabulary 4096 --out data/demo-frequencies.npz
	@echo "== 3/5 routing: token -> table rows"
	$(RUN) route --frequencies data/demo-frequencies.npz --vocabulary 4096 --compression 0.5 --views 2 \
	    --vip 50 --buckets 16 --out data/demo-routing.npz
	@echo "== 4/5 training: vanilla, then X-gram, on the same batches"
	$(RUN) train recipes/tiny/vanilla.yaml --ranks 2 --fresh
	$(RUN) train recipes/tiny/xgram.yaml memory.routing.file=data/demo-routing.npz --ranks 2 --fresh
	@echo "== 5/5 result"
	$(RUN) report runs/tiny-vanilla runs/tiny-xgram --picture runs/demo.png

# Kill runs, at all kinds of moments, on every tier, disk and launcher, and compare their ends with those of runs
# nothing happened to. SOAK="--only Slurm" for one phase; SOAK="--list FILE" for each kill with its time.
soak: .venv/installed slurm
	$(BIN)/python tests/resume/soak.py --kills $(KILLS) $(SOAK)

# Files that nobody wrote. By hand for longer: FUZZ="--inputs 1000000 --seed 1" make fuzz
fuzz: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/fuzz_readers.py $(FUZZ)

# The numbers that tests/golden holds every later tree against. Only where numbers are meant to change.
golden: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden/golden_runs.py

test: lint slurm
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations=5

test-fast: lint
	@echo "== unit and parity tests; left out: tests/distributed, tests/golden, tests/resume, tests/slurm (make test has them)"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --durations=5 tests/unit tests/parity

# Debian's Slurm for tests/slurm, where packages may be installed; without it those tests are skipped and say why.
SLURM := slurm-wlm munge iproute2
slurm:
	@if ! { command -v slurmctld && command -v munged; } >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    export DEBIAN_FRONTEND=noninteractive; \
	    apt-get install -qq --no-install-recommends $(SLURM) >/dev/null 2>&1 \
	    || { apt-get update -qq && apt-get install -qq --no-install-recommends $(SLURM) >/dev/null; } \
	    || echo "== no Slurm could be installed; its tests are skipped"; \
	fi

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Resolve all dependencies anew (about ten minutes) and pin them.
lock:
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/pip install --quiet --dry-run --ignore-installed --report .venv-lock/report.json '.[deepspeed,eval,s3,streaming,parquet,plots,wandb,mlflow,dev]'
	$(PYTHON) tools/lock.py .venv-lock/report.json > requirements.lock
	rm -rf .venv-lock

dist: .venv/installed
	$(BIN)/python tools/build_dist.py dist

test-package: .venv/installed
	$(BIN)/pytest tests/package

# The environment of the benchmark's peers.
peers:
	$(PYTHON) -m venv --clear tools/peers/.venv
	tools/peers/.venv/bin/pip install --disable-pip-version-check --no-deps -r tools/peers/requirements.txt

# The environment that serves exported models: vLLM for CPUs, and this package as its plugin.
tools/serving/.venv/installed: tools/serving/requirements.txt pyproject.toml
	@echo "== environment of serving in tools/serving/.venv (a few minutes, once)"
	$(PYTHON) -m venv --clear tools/serving/.venv
	tools/serving/.venv/bin/pip install --disable-pip-version-check --no-deps -r tools/serving/requirements.txt
	tools/serving/.venv/bin/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

serving: tools/serving/.venv/installed

test-serving: .venv/installed serving
	OMP_NUM_THREADS=1 $(BIN)/pytest --durations=5 tests/serving

# The environment of the torchtitan example, and the example on two ranks.
tools/titan/.venv/installed: tools/titan/requirements.txt pyproject.toml
	@echo "== environment of torchtitan in tools/titan/.venv (a few minutes, once)"
	$(PYTHON) -m venv --clear tools/titan/.venv
	tools/titan/.venv/bin/pip install --disable-pip-version-check --no-deps -r tools/titan/requirements.txt
	tools/titan/.venv/bin/pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

titan: tools/titan/.venv/installed
	OMP_NUM_THREADS=1 tools/titan/.venv/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
	    docs/examples/torchtitan_loop.py

reference: .venv/installed
	$(BIN)/python tools/config_reference.py > docs/configuration.md
	$(BIN)/xgram-dist schema > recipes/schema.json

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
