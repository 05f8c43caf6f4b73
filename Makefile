# One virtual environment for everything, in .venv.
#
#   make run                     train the default job in runs/default
#   make run RUN=runs/demo       the same in another directory
#   make test                    lint, types, import contracts and every test
#   make test PYTEST_ARGS="tests/daemon -k lease"
#   make test-isaaclab test-mjlab   tests that need these simulators, in environments of their own
#   make docs                    the documentation as HTML, in build/docs
#
# TORCH names the build to install. A plain index may hold torch's CUDA build only (several GB);
# where there is no GPU, point pip at an index of CPU builds (PIP_EXTRA_INDEX_URL) and say
# TORCH=torch==2.13.0+cpu.

PYTHON ?= python3
TORCH ?= torch==2.13.0
RUN ?= runs/default
ARGS ?=
PYTEST_ARGS ?=
# On two cores: many tests wait for clocks, leases and processes more than they compute.
TEST_WORKERS ?= 3

BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: help run test test-isaaclab test-mjlab lint docs stubs clean

help:
	@sed -n '3,8s/^# *//p' Makefile

# ARGS goes to `rallypoint run`, for example ARGS="--workers 3 --iterations 50".
run: .venv/installed
	@if [ -d '$(RUN)' ]; then \
	  echo '$(RUN) exists: its job goes on from where it stopped; one that has finished only'; \
	  echo 'reports its result. For a new one: make run RUN=runs/another'; \
	fi
	$(BIN)/rallypoint run --dir '$(RUN)' $(ARGS)

# More tests than cores run side by side, and many start a dozen processes: what fails so is tried once
# more by itself, and is listed. Who fails again has failed.
test: lint
	$(BIN)/pytest -n $(TEST_WORKERS) --dist worksteal $(PYTEST_ARGS) || \
	  { [ $$? -eq 1 ] && echo 'What failed beside others, once more by itself:' && \
	    $(BIN)/pytest -v --maxfail=1 --last-failed --last-failed-no-failures=none $(PYTEST_ARGS); }

# Kernels that Warp compiles stay where they are for the next time.
test-isaaclab: .venv-isaaclab/installed
	WARP_CACHE_PATH='$(CURDIR)/.venv-isaaclab/kernels' .venv-isaaclab/bin/python -m pytest \
	  -k isaaclab tests/trainer/envs/simulators tests/faults/scenarios/test_isaaclab_run.py

test-mjlab: .venv-mjlab/installed
	WARP_CACHE_PATH='$(CURDIR)/.venv-mjlab/kernels' .venv-mjlab/bin/python -m pytest \
	  -k mjlab tests/trainer/envs/simulators tests/faults/scenarios/test_mjlab_run.py

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The pages as HTML: build/docs/docs/README.html. A warning is an error, here and in the tests.
docs: .venv/installed-dev
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html -c docs . build/docs

# daemon/etcd/rpc_pb2.py, by a compiler that is old enough for every protobuf that users may have.
stubs:
	$(PYTHON) -m venv build/stubs
	build/stubs/bin/pip --disable-pip-version-check install grpcio-tools==1.71.2 setuptools
	build/stubs/bin/python daemon/etcd/generate.py

# Leaves runs/ alone.
clean:
	rm -rf .venv .venv-isaaclab .venv-mjlab build dist .coverage* .hypothesis .*_cache src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch comes first and by itself, so that the line above decides its build.
.venv/installed: pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit("rallypoint needs Python 3.11 or newer; " + sys.executable \
	  + " is " + sys.version.split()[0] + ": make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) install '$(TORCH)' -c requirements-dev.txt
	$(PIP) install -e . -c requirements-dev.txt
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) install -r requirements-dev.txt
	@touch $@

# Two simulators that want other versions of MuJoCo, each on top of .venv: what is not there is looked for
# in .venv, but for its MuJoCo. On Python 3.11 too, although Isaac Lab asks for 3.12: there it has been
# found to run. pip lists what the simulators ask for and these tests do not need.
.venv-isaaclab/installed: .venv/installed-dev requirements-isaaclab.txt
	$(call on_top,.venv-isaaclab)
	.venv-isaaclab/bin/pip install -q --no-deps --ignore-requires-python isaaclab==3.0.0
	.venv-isaaclab/bin/pip install -q -r requirements-isaaclab.txt
	@touch $@

.venv-mjlab/installed: .venv/installed-dev requirements-mjlab.txt
	$(call on_top,.venv-mjlab)
	.venv-mjlab/bin/pip install -q --no-deps mjlab==1.6.0 rsl-rl-lib==5.4.2
	.venv-mjlab/bin/pip install -q -r requirements-mjlab.txt
	@touch $@

define on_top
	$(PYTHON) -m venv --clear $(1)
	rm -rf build/below$(1)
	mkdir -p build/below$(1)
	ln -s $(CURDIR)/.venv/lib/python3*/site-packages/* build/below$(1)
	rm build/below$(1)/mujoco*
	cd $(1)/lib/python3*/site-packages && \
	  echo "import site; site.addsitedir('$(CURDIR)/build/below$(1)')" > below.pth
endef
