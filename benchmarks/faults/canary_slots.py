"""The slots: files of an adapter, of a checkpoint, of a model, of the data, and the recipe.

A slot yields cases. A case is an attempt that ends in a TiercelError, returns None if tiercel continues without having
opened the canary, or returns what is wrong.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.ipc
import torch
from pyarrow import parquet

from benchmarks.faults.payloads import Canary
from benchmarks.faults.tiny_run import TinyRun, make_tiny_run
from tests.rewards.runtime.test_model import save_reward_model
from tests.tiny_models import TINY_LORA, tiny_recipe
from tiercel.config import load_recipe
from tiercel.config.schema import Data, Model
from tiercel.data.media.images import decode, open_header
from tiercel.data.media.videos import open_video
from tiercel.data.reading import read_rows
from tiercel.models.families.loading import load_family
from tiercel.models.policy import build_policy, load_for_inference
from tiercel.models.rendering import render
from tiercel.models.weights.loading import load_weights
from tiercel.rewards.external import RewardModel
from tiercel.rewards.runtime.model import load_reward_model
from tiercel.runs.checkpoints import MANIFEST, directory_of, newest_valid
from tiercel.runs.files import file_sha256
from tiercel.runs.recipe import load_run_recipe
from tiercel.training.checkpoints import pending_of
from tiercel.training.trainer import build_trainer
from tiercel.types import ImageSource, Message, VideoSource

CPU = torch.device("cpu")
Attempt = Callable[[], str | None]
Case = tuple[str, Attempt]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workplace:
    """A good run whose parts the slots copy and spoil."""

    canary: Canary
    run: TinyRun
    checkpoint: Path  # of the run
    model: Path


def make_workplace(work_dir: Path) -> Workplace:
    run = make_tiny_run(work_dir)
    run.save(work_dir / "run", 1)
    return Workplace(
        canary=Canary(file=work_dir / "canary"),
        run=run,
        checkpoint=directory_of(work_dir / "run" / "checkpoints", 1),
        model=Path(run.recipe.model.path),
    )


def copied(source: Path, place: Path, files: Mapping[str, bytes | None]) -> Path:
    """Return a copy with some files replaced, added or (None) removed."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, place)
    for name, content in files.items():
        if content is None:
            (place / name).unlink(missing_ok=True)
        else:
            (place / name).write_bytes(content)
    return place


def edited(file: Path, **changes: object) -> bytes:
    """Return the text of a JSON file with other values."""
    return json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes).encode()


def adapter_files(place: Workplace, root: Path) -> Iterator[Case]:
    canary, adapter = place.canary, place.checkpoint / "adapter"
    sys.path.insert(0, str(root / "adapter"))  # where a config's module would be looked for at worst
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    megatron = edited(adapter / config, megatron_config={"a": 1}, megatron_core="canary_module")
    spoilt: dict[str, dict[str, bytes | None]] = {
        "weights as .bin only": {weights: None, "adapter_model.bin": canary.torch_file()},
        "weights as .pt only": {weights: None, "adapter_model.pt": canary.torch_file()},
        "a pickle named .safetensors": {weights: canary.pickled()},
        "a torch file named .safetensors": {weights: canary.torch_file()},
        "a pickle for the config": {config: canary.pickled()},
        "a binary pickle for the config": {config: canary.pickled_binary()},
        "a module to import in the config": {config: megatron, "canary_module.py": canary.module()},
        "another kind of adapter": {config: edited(adapter / config, peft_type="../../canary_module")},
    }
    for name, files in spoilt.items():
        directory = copied(adapter, root / "adapter", files)
        initial = tiny_recipe(place.model, lora=TINY_LORA.model_copy(update={"init": str(directory)}))
        yield f"{name}, to predict", lambda d=directory: _must_refuse(load_for_inference(place.run.recipe, CPU, d))
        yield f"{name}, as lora.init", lambda recipe=initial: _must_refuse(build_policy(recipe, CPU))
    directory = copied(adapter, root / "both", {"adapter_model.bin": canary.torch_file()})
    yield "a pickle beside good weights", lambda: _unopened(load_for_inference(place.run.recipe, CPU, directory))


def checkpoint_files(place: Workplace, root: Path) -> Iterator[Case]:
    canary = place.canary
    names = sorted(p.relative_to(place.checkpoint).as_posix() for p in place.checkpoint.rglob("*") if p.is_file())
    for kind, content in (("pickle", canary.pickled()), ("torch file", canary.torch_file())):
        for name in names:
            yield f"a {kind} for {name}", _passed_over(place, root, {name: content}, is_forged=False)
            if name != MANIFEST:
                case = f"a {kind} for {name}, manifest forged"
                yield case, _passed_over(place, root, {name: content}, is_forged=True)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "adapter/adapter_model.bin"):
        yield f"{name} more", _left_alone(place, root, {name: canary.torch_file()})


def _passed_over(place: Workplace, root: Path, files: Mapping[str, bytes], *, is_forged: bool) -> Attempt:
    """Return an attempt in which the checkpoint must be skipped. With a manifest that fits the files, it must be
    refused when it is loaded, or before."""

    def attempt() -> str | None:
        path = copied(place.checkpoint, root / "step-000001", files)
        if is_forged:
            stated = {name: file_sha256(path / name) for name in json.loads((path / MANIFEST).read_text())["sha256"]}
            (path / MANIFEST).write_text(json.dumps({"sha256": stated}), encoding="utf-8")
        said: list[str] = []
        found = newest_valid(root, said.append)
        if found is None:
            return None if len(said) == 1 and "is passed over" in said[0] else f"it said {said}"
        if not is_forged:
            return "it was found valid"
        build_trainer(place.run.recipe, found)
        pending_of(found)
        # The adapter's config is for other readers; a run resumes by its recipe.
        return None if set(files) == {"adapter/adapter_config.json"} else "it was loaded"

    return attempt


def _left_alone(place: Workplace, root: Path, files: Mapping[str, bytes]) -> Attempt:
    """Return an attempt in which the checkpoint is loaded, and files that its manifest does not list are not opened."""

    def attempt() -> str | None:
        copied(place.checkpoint, root / "step-000001", files)
        found = newest_valid(root, print)
        if found is None:
            return "it was passed over"
        build_trainer(place.run.recipe, found)
        pending_of(found)
        return None

    return attempt


def model_files(place: Workplace, root: Path) -> Iterator[Case]:
    canary, model = place.canary, place.model
    weights, config, tokenizer = "model.safetensors", "config.json", "tokenizer_config.json"
    code = {"modeling_canary.py": canary.module()}
    remote = {"AutoModel": "modeling_canary.Model", "AutoConfig": "modeling_canary.Config"}
    for kind, content in (("pickle", canary.pickled()), ("torch file", canary.torch_file())):
        yield f"a {kind} as .bin only", _loading(place, root, {weights: None, "pytorch_model.bin": content})
        yield f"a {kind} named .safetensors", _loading(place, root, {weights: content})
        for named in ("pytorch_model.bin", "../shard.safetensors.bin", "/shard.pt"):
            index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": named}}).encode()
            files = {weights: None, "model.safetensors.index.json": index, "pytorch_model.bin": content}
            yield f"an index of a {kind} {named}", _loading(place, root, files)
        for name in (config, "tokenizer.json", tokenizer, "preprocessor_config.json", "generation_config.json"):
            yield f"a {kind} for {name}", _loading(place, root, {name: content})
        yield f"a {kind} beside", _loading(place, root, {"pytorch_model.bin": content}, is_good=True)
    yield "code of its own", _loading(place, root, code | {config: edited(model / config, auto_map=remote)})
    ovis = edited(model / config, auto_map=remote, model_type="ovis")
    yield "code of its own, as Ovis2's authors have it", _loading(place, root, code | {config: ovis})
    unknown = edited(model / config, auto_map=remote, model_type="canary")
    yield "code of its own, of an unknown kind", _loading(place, root, code | {config: unknown})
    own = {"AutoTokenizer": ["modeling_canary.Slow", "modeling_canary.Fast"]}
    spoilt = edited(model / tokenizer, auto_map=own, tokenizer_class="CanaryTokenizer")
    yield "a tokenizer of its own", _loading(place, root, code | {tokenizer: spoilt}, is_good=True)
    processor = edited(model / "preprocessor_config.json", auto_map={"AutoImageProcessor": "modeling_canary.Images"})
    files = code | {"preprocessor_config.json": processor}
    yield "an image processor of its own", _loading(place, root, files, is_good=True)


def _loading(place: Workplace, root: Path, files: Mapping[str, bytes | None], *, is_good: bool = False) -> Attempt:
    """Return an attempt in which the model must be refused. With `is_good`, it may be loaded from its good parts
    without opening the canary."""

    def attempt() -> str | None:
        directory = copied(place.model, root / "model", files)
        load_weights(load_family(Model(path=str(directory))), torch.float32, CPU)
        return None if is_good else "it was loaded"

    return attempt


def chat_templates(place: Workplace, root: Path) -> Iterator[Case]:
    root.mkdir(parents=True)
    file = root / "template.jinja"

    def rendering(template: str, content: str = "What?") -> Attempt:
        def attempt() -> str | None:
            file.write_text(template, encoding="utf-8")
            family = load_family(Model(path=str(place.model)), str(file))
            text = render(family, (Message(role="user", content=content),), True)
            reached = [word for word in ("<class", "built-in", "root:", "0x") if word in text]
            return f"the template reached {text[:80]}" if reached else None

        return attempt

    own = load_family(Model(path=str(place.model))).checkpoint.chat_template
    for template in place.canary.templates():
        yield template[:60], rendering(template)
        yield f"as a row's text: {template[:60]}", rendering(own, template)
    binary = root / "binary.jinja"
    binary.write_bytes(place.canary.pickled_binary())
    yield "a pickle", lambda: _must_refuse(load_family(Model(path=str(place.model)), str(binary)))


def row_files(place: Workplace, root: Path) -> Iterator[Case]:
    canary = place.canary
    root.mkdir(parents=True)
    contents = {"pickle": canary.pickled(), "torch-file": canary.torch_file(), "numpy-file": canary.numpy_file()}
    for kind, content in contents.items():
        for ending in ("jsonl", "json", "parquet", "npy", "pkl", "pt"):
            file = root / f"{kind}.{ending}"
            file.write_bytes(content)
            yield f"{kind} as .{ending}", lambda file=file: _must_refuse(_read(file))
        image = root / f"{kind}.png"
        image.write_bytes(content)
        for read in (open_header, decode):
            source, embedded = ImageSource(path=image.name), ImageSource(data=content)
            yield f"{kind} as an image", lambda r=read, s=source: _must_refuse(r(s, root, 10_000))
            yield f"{kind} embedded as an image", lambda r=read, s=embedded: _must_refuse(r(s, root, 10_000))
    table = root / "rows.parquet"
    text, objects = pyarrow.array(["7"]), pyarrow.array([canary.pickled_binary()], pyarrow.binary())
    yield "Parquet whose column is a pickled type", lambda: _unopened(_read_parquet(table, text, canary))
    yield "Parquet with pickled values", lambda: _must_refuse(_read_parquet(table, objects, canary))
    turns = json.dumps({"messages": [{"role": "user", "content": canary.expression()}], "answer": canary.expression()})
    expressions = root / "expressions.jsonl"
    expressions.write_text(turns + "\n", encoding="utf-8")
    yield "an expression as text", lambda: _unopened(_read(expressions))


def _read(file: Path) -> object:
    return read_rows(file, Data(train=str(file), format="tiercel"), "grpo")


def _read_parquet(file: Path, column: pyarrow.Array, canary: Canary) -> None:
    """Read a row with the column, whose field claims the type that older pyarrow unpickled."""
    pickled = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": canary.pickled()}
    turn = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    messages = pyarrow.array([[{"role": "user", "content": "What?"}]], pyarrow.list_(turn))
    fields = [pyarrow.field("messages", messages.type), pyarrow.field("answer", column.type, metadata=pickled)]
    parquet.write_table(pyarrow.Table.from_arrays([messages, column], schema=pyarrow.schema(fields)), file)
    _read(file)


def data_sets(place: Workplace, root: Path) -> Iterator[Case]:
    """Yield directories as saved by Hugging Face's datasets, and videos."""
    canary, good = place.canary, root / "good"
    good.mkdir(parents=True)
    table = pyarrow.table({"problem": ["7"], "solution": ["7"]})
    with pyarrow.OSFile(str(good / "data.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    (good / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}), encoding="utf-8")
    yield "a good data set", lambda: _unopened(_read_data_set(good))
    for kind, content in (("pickle", canary.pickled()), ("torch file", canary.torch_file())):
        for name in ("data.arrow", "state.json"):
            directory = copied(good, root / f"{kind} {name}", {name: content})
            yield f"a {kind} for {name}", lambda d=directory: _must_refuse(_read_data_set(d))
        beside = copied(good, root / f"{kind} beside", {"dataset.pkl": content, "cache.arrow": content})
        yield f"a {kind} beside", lambda d=beside: _unopened(_read_data_set(d))
        (root / f"{kind}.mp4").write_bytes(content)
        video = VideoSource(path=f"{kind}.mp4")
        yield f"a {kind} as a video", lambda v=video: _must_refuse(open_video(v, root, Data(train="rows.jsonl")))


def _read_data_set(directory: Path) -> object:
    return read_rows(directory, Data(train=str(directory)), "grpo")


def reward_models(place: Workplace, root: Path) -> Iterator[Case]:
    canary, good = place.canary, save_reward_model(root / "good")
    weights, config, tokenizer = "model.safetensors", "config.json", "tokenizer_config.json"
    code = {"modeling_canary.py": canary.module()}
    remote = {"AutoModelForSequenceClassification": "modeling_canary.Model", "AutoConfig": "modeling_canary.Config"}
    spoilt: dict[str, dict[str, bytes | None]] = {
        "code of its own": code | {config: edited(good / config, auto_map=remote)},
        "a pickled adapter beside": {"adapter_config.json": b"{}", "adapter_model.bin": canary.torch_file()},
    }
    for kind, content in (("pickle", canary.pickled()), ("torch file", canary.torch_file())):
        index = json.dumps({"metadata": {}, "weight_map": {"score.weight": "pytorch_model.bin"}}).encode()
        spoilt |= {
            f"a {kind} as .bin only": {weights: None, "pytorch_model.bin": content},
            f"a {kind} named .safetensors": {weights: content},
            f"an index of a {kind}": {weights: None, f"{weights}.index.json": index, "pytorch_model.bin": content},
            f"a {kind} for its config": {config: content},
            f"a {kind} for its tokenizer": {"tokenizer.json": content},
        }
    for number, (name, files) in enumerate(spoilt.items()):
        directory = copied(good, root / str(number), files)
        yield name, lambda d=directory: _must_refuse(load_reward_model(RewardModel(path=str(d))))
    own = edited(good / tokenizer, auto_map={"AutoTokenizer": ["modeling_canary.Slow", None]})
    directory = copied(good, root / "tokenizer", code | {tokenizer: own, "pytorch_model.bin": canary.torch_file()})
    yield "a tokenizer of its own", lambda: _unopened(load_reward_model(RewardModel(path=str(directory))))


def recipes(place: Workplace, root: Path) -> Iterator[Case]:
    root.mkdir(parents=True)
    good = "model: {path: a/b}\ndata: {train: rows.jsonl}\ntrain: {steps: 1}\noutput: run\n"
    file, pickled = root / "recipe.yaml", root / "pickled.yaml"
    for value in place.canary.yaml():
        file.write_text(good + f"data2: {value}\n", encoding="utf-8")
        yield f"a recipe with {value[:50]}", lambda: _must_refuse(load_recipe("sft", file, [], check_paths=False))
        (root / "config.yaml").write_text(f"# tiercel sft\n{value}\n", encoding="utf-8")
        yield f"a run's recipe with {value[:50]}", lambda: _must_refuse(load_run_recipe(root))
        (root / "good.yaml").write_text(good, encoding="utf-8")
        yield (
            f"an override with {value[:50]}",
            lambda value=value: _must_refuse(
                load_recipe("sft", root / "good.yaml", [f"output={value}"], check_paths=False)
            ),
        )
    for name, content in (("pickle", place.canary.pickled()), ("binary pickle", place.canary.pickled_binary())):
        pickled.write_bytes(content)
        yield f"a {name} for a recipe", lambda: _must_refuse(load_recipe("sft", pickled, [], check_paths=False))


def _must_refuse(loaded: object) -> str | None:
    return f"it was taken: {type(loaded).__name__}"


def _unopened(loaded: object) -> str | None:
    return None


SLOTS: dict[str, Callable[[Workplace, Path], Iterator[Case]]] = {
    "adapter": adapter_files,
    "checkpoint": checkpoint_files,
    "model": model_files,
    "chat template": chat_templates,
    "rows": row_files,
    "data set": data_sets,
    "reward model": reward_models,
    "recipe": recipes,
}
