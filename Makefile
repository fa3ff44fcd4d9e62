# make quickstart: install and train.  make test: install and test.  make help: the rest.
PYTHON ?= python3
# cpu, cuda or rocm: what kernels and DeepSpeed's ops are built for.
DEVICE ?= cpu
# native or deepspeed: what the quick start trains with. It installs no more than that takes.
ENGINE ?= native
TORCH_VERSION ?= 2.13.0
# An index URL or a folder that has the wanted build of torch; empty: where pip is pointed anyway.
TORCH_INDEX ?=
# 1: hold every package to its SHA-256 (constraints/hashes). PyPI's torch; one of TORCH_INDEX is taken as it is.
HASHES ?=
SMALL ?=
SHARE_GPU ?=
SHARD ?=
MOE ?=
LONG ?=
# What make kernels builds (empty: all that has a compiler), and for which GPUs.
KERNELS ?=
ARCHS ?=
ARGS ?=
# 1: take PYTHON as it is, without .venv, pip and a network. For gpu-check, compare, site-report, gpu-session.
NO_SETUP ?=

VENV := $(if $(NO_SETUP),PYTHONPATH=$(CURDIR) $(PYTHON),.venv/bin/python)
APT := sudo apt-get install -y git make g++ python3-dev python3-venv
export SMALL SHARE_GPU SHARD MOE LONG DEVICE ENGINE

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test docs mutations soak kernels budgets lint gpu-check gpu-session ghost-check compare site-report release lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo "variables: PYTHON=$(PYTHON) DEVICE=cpu|cuda|rocm ENGINE=native|deepspeed TORCH_VERSION=$(TORCH_VERSION) TORCH_INDEX=URL SMALL=1 ARGS='pytest arguments'"

setup:  ## make or update the environment in .venv; does nothing when it is up to date
	@command -v $(PYTHON) >/dev/null || { echo "setup: no $(PYTHON) here. Once, as root:"; echo "  $(APT)"; exit 3; }
	@$(if $(NO_SETUP),:,$(PYTHON) scripts/setup.py) --device '$(DEVICE)' --torch-version '$(TORCH_VERSION)' --torch-index '$(TORCH_INDEX)' --hashes '$(HASHES)' $(NEEDS)

# These use the device: without one they stop before anything is downloaded. An environment alone may be made anywhere.
quickstart gpu-check: NEEDS := --needs-device
# Neither DeepSpeed, unless ENGINE=deepspeed, nor what only tests need.
quickstart: NEEDS += --to-train '$(ENGINE)'

quickstart: setup  ## fetch a corpus and train a GPT with tp 2 x pp 2 x dp 2 (SMALL=1: 4 ranks; SHARD=1: ZeRO-3; MOE=1: experts; LONG=1: context parallelism; DEVICE=cuda: on GPUs; ENGINE=deepspeed: the other engine)
	@$(VENV) scripts/quickstart.py

test: setup  ## every test that this machine can run
	@$(VENV) scripts/run_tests.py $(ARGS)

docs: setup  ## the documentation as a site in site/, strictly: a broken link or an unlisted page is an error
	@$(VENV) -m pip install --quiet --require-hashes -r constraints/hashes/docs.txt
	@NO_MKDOCS_2_WARNING=1 $(VENV) -m mkdocs build --strict $(ARGS) && echo "docs: open site/index.html"

mutations: setup  ## are silent faults caught? each of tests/mutants.toml in a copy of the tree (ARGS='--only rope')
	@$(VENV) tests/mutants.py $(ARGS)

soak: setup  ## the long fault tests, resumable: benchmarks/results/soak-*.jsonl (ARGS='--part kills --seconds 600')
	@$(VENV) scripts/soak.py $(ARGS)

kernels: setup  ## build our kernels ahead of time, for every compiler here (KERNELS="cpu cuda rocm", ARCHS=sm_90)
	@$(VENV) kernels/build.py $(if $(KERNELS),binding $(KERNELS)) --archs '$(ARCHS)'

budgets: setup  ## compile all device code, hold instructions, bytes and spills to kernels/budgets (ARGS='gfx90a')
	@$(VENV) kernels/budget.py --all $(ARGS)

lint: setup  ## ruff, mypy, and the readability of all pages
	@$(VENV) scripts/run_tests.py --lint-only

gpu-check: setup  ## build the kernels, the tests marked gpu, times and rates of every op (DEVICE=cuda or rocm)
	@$(VENV) scripts/gpu_check.py $(ARGS)

gpu-session: setup  ## a quarter of an hour on a GPU in two commands: MFU beside others, checks, rates (ARGS=a, then ARGS=b; NO_SETUP=1)
	@$(VENV) scripts/gpu_session.py $(ARGS)

ghost-check: setup  ## CUDA's torch and NCCL without a GPU: layouts, resume, budgets, captured steps (3 GB to download)
	@$(VENV) tests/ghost/check.py $(ARGS)
	@$(VENV) tests/ghost/budgets.py
	@$(VENV) tests/ghost/refused.py
	@$(VENV) tests/ghost/recorded.py
	@$(VENV) tests/ghost/expert_waits.py
	@$(VENV) tests/ghost/priorities.py

compare: setup  ## the same GPT through this project and what people would use instead (ARGS='--sizes tiny --peers ours torch')
	@$(VENV) -m benchmarks.compare $(ARGS)

site-report: setup  ## one archive with what this machine does: checks, layouts, speed, predictions (ARGS=--short)
	@$(VENV) scripts/site_report.py $(ARGS)

release: setup  ## sdist and wheel with CPU kernels, reproducible, with hashes and a bill of materials, in dist/ (ARGS=--once)
	@$(VENV) scripts/release.py $(ARGS)

lock: setup  ## resolve constraints/ anew
	@$(VENV) -m pip install --quiet uv && $(VENV) scripts/lock.py

clean:  ## remove .venv and build output; keeps .cache/wheels and runs/
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache/setup
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
