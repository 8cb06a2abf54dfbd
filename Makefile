# Thin names for what scripts/ does. `make demo` and `make test` set everything up by themselves.
.PHONY: help demo test check coverage plant vllm bench docs gpu stubs format clean
.DEFAULT_GOAL := help

help:  ## print this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

demo:  ## set up, then generate text with a growing KV cache beside the usual ones
	@scripts/venv.sh demo
	@scripts/build.sh
	@scripts/demo.sh

test:  ## set up, then run the Python tests but the slow ones (GPU tests skip without a GPU)
	@scripts/venv.sh test
	@scripts/build.sh
	@scripts/test.sh

check:  ## lint, types, layers, stub, format, slow Python tests, C++ tests under the sanitizers (needs doctest)
	@scripts/venv.sh dev
	@scripts/build.sh
	@scripts/check.sh

coverage:  ## count the lines of csrc/ that the C++ tests and the quick Python tests execute (needs doctest)
	@scripts/venv.sh dev
	@scripts/build.sh
	@scripts/coverage.sh

plant:  ## plant the faults of tests/planted.toml, and see each found by its test (needs doctest)
	@scripts/venv.sh dev
	@scripts/build.sh
	@.venv/bin/python scripts/plant.py

vllm:  ## install vLLM for CPUs under build/vllm, then test the plug-in in it
	@scripts/vllm.sh tests

bench:  ## measure against the baselines, as ratios in one run
	@scripts/venv.sh test
	@scripts/build.sh
	@scripts/bench.sh

docs:  ## build the documentation into build/site; warnings are errors
	@scripts/venv.sh dev
	@scripts/docs.sh

gpu:  ## on a GPU: build offline, test, and answer the questions of benchmarks/gpu.py in 8 minutes
	@scripts/gpu.sh

stubs:  ## regenerate vtensor/_core.pyi from the extension
	@scripts/venv.sh dev
	@scripts/build.sh
	@scripts/stubs.sh

format:  ## rewrite sources in the house format
	@scripts/venv.sh dev
	@scripts/format.sh

clean:  ## remove builds and caches; the virtual environment stays
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
