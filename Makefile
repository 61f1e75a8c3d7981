# The environment is made once (scripts/setup_env.py skips what is already there) and then only looked up.
SHELL := /bin/bash
export PYTHONPATH := $(CURDIR)
# Idle threads spin briefly, then sleep: endless spinning (the default) is ruinous on a busy machine, none at all slow on an idle one.
export GOMP_SPINCOUNT ?= 3000

.PHONY: demo test test-fast rivals check env clean

demo:   ## the whole job with the embedded target: about four minutes on two cores
	@started=$$(date +%s.%N); python=$$(python3 scripts/setup_env.py) && DEMO_STARTED=$$started $$python scripts/demo.py $(ARGS)

env:    ## .venv with everything that development needs
	@python3 scripts/setup_env.py dev

test: env rivals   ## every test, the slow ones too
	@$$(python3 scripts/setup_env.py dev) -m pytest $(ARGS)

test-fast: env     ## unit and numerics
	@$$(python3 scripts/setup_env.py dev) -m pytest tests/unit tests/numerics -m "not slow" $(ARGS)

rivals: env        ## what tests compare with: NeMo AutoModel, z-lab's client, MLX and llama.cpp (their pins clash, hence --no-deps), llama.cpp's converter, real chat templates
	@python=$$(python3 scripts/setup_env.py dev) && $$python scripts/install_rivals.py && $$python scripts/fetch_llama_cpp.py >/dev/null

check: env         ## lint
	@$$(python3 scripts/setup_env.py dev) -m ruff check . && $$(python3 scripts/setup_env.py dev) -m ruff format --check .

clean:  ## what was installed and cached; runs in outputs/ stay
	rm -rf .venv .rivals .pytest_cache .ruff_cache .hypothesis
