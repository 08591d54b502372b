"""Every read of a file of a run goes through regular_files.py, which bounds it. This is checked in the whole source.

A run directory may contain pipes, devices, links and endless files. No module opens a file by itself, except those
listed here: modules that read no file of a run, and calls that are safe for another reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import tiercel

ROOT = Path(tiercel.__file__).parent
HELPER = "tiercel.regular_files"
OPENERS = {"open", "fdopen", "read_text", "read_bytes", "safe_open", "load_file", "memmap"}
NO_FILE_OF_A_RUN = {
    **dict.fromkeys(
        (
            *("cli/preload.py", "models/families/loading.py", "models/weights/saving.py"),
            *("models/weights/checkpoint_files.py", "models/weights/memory_errors.py"),
        ),
        "weights",
    ),
    **dict.fromkeys(("rollout/vllm/full_weights.py", "distributed/versions.py"), "weights"),
    **dict.fromkeys(("cli/import_command.py", "config/deepspeed.py", "config/loading.py"), "a recipe, a script"),
    **dict.fromkeys((f"convert/{name}.py" for name in ("launches", "rewards", "rows", "values")), "a script"),
    **dict.fromkeys(
        ("doctor/verdict.py", "tables.py", "reliability/card_faults.py", "messages/__init__.py", "demo/running.py"),
        "our own files",
    ),
    **dict.fromkeys(("demo/real_parts.py", "demo/real_model.py"), "installed packages, weights"),
    **dict.fromkeys(
        ("data/media/images.py", "data/readers.py", "data/arrow_files.py", "data/media/videos.py", "image_decoding.py"),
        "rows, with own limits",
    ),
    **dict.fromkeys(
        ("data/index.py", "data/index_sources.py", "data/tar_shards.py", "data/remote.py"),
        "rows, and the cache of their indexes and copies",
    ),
    **dict.fromkeys(
        ("rewards/text.py", "rewards/runtime/judge.py", "rewards/runtime/model.py"), "a schema, a prompt, a template"
    ),
    **dict.fromkeys(
        ("distributed/exit_diagnosis.py", "distributed/rank_monitor.py", "distributed/rank_status_files.py"),
        "/proc, /tmp",
    ),
    **dict.fromkeys(("doctor/machine.py", "processes.py", "sandbox/supervisor.py"), "/proc"),
    **dict.fromkeys(("rollout/vllm/shared_memory.py", "web/view/serving.py"), "/dev/shm, the user's state directory"),
    "regular_files.py": "the helper",
}
SAFE = {
    ("cli/plan.py", "file.open('x', encoding='utf-8')"): "writes a new file",
    ("cli/dry_run.py", "dialogues.open(prompt, [0])"): "no file",
    (
        "rollout/branching.py",
        "Thoughts(at=None, stop=(), limits=self.limits_of(prompt)).open(prompt, samples)",
    ): "no file",
    ("rollout/trajectory.py", "dialogues.open(prompt, range(params.group_size))"): "no file",
    (
        "training/grpo/completion_sampling.py",
        "self.dialogues.open(prompt, [self.first + sample for sample in samples])",
    ): "no file",
    ("trackers/opening.py", "trackers.open(name, place_of(recipe, run, name, run_id, kept), kept)"): "no file",
    ("rewards/runtime/signature_adapters.py", "image.open()"): "a picture of a row",
    ("rewards/runtime/signature_adapters.py", "found.open()"): "a picture of a row",
    ("data/fetch.py", "part.open('w', encoding='utf-8')"): "writes in the folder of --to",
    ("cli/main.py", "os.open(os.devnull, os.O_WRONLY)"): "takes what nobody reads",
    ("data/rejected_rows.py", "Path(path).open('w', encoding='utf-8')"): "writes where the user says",
    ("distributed/strategies/shard_files.py", "safe_open(file, 'pt')"): "of a checkpoint whose manifest was compared",
    ("packing/kernel_table.py", "file.read_text(encoding='utf-8')"): "our own",
    ("web/report/page.py", "(Path(__file__).parent.parent / 'static' / name).read_text(encoding='utf-8')"): "our own",
    ("web/report/pictures.py", "Image.open(stream, formats=('WEBP', 'PNG'))"): "opened by the helper",
    ("runs/call_files.py", "path.read_bytes()"): "what the recipe names",
    ("runs/lock.py", "os.open(self._file, _FLAGS, 438)"): "not read",
    ("runs/lock.py", "os.open(self._path / LOCK, _FLAGS, 438)"): "not read",
    ("runs/ending.py", "os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)"): "not read",
    ("runs/files.py", "os.open(path, os.O_RDONLY)"): "flushed, not read",
    ("runs/files.py", "path.open('rb')"): "read in blocks, after is_file",
    ("runs/progress.py", "self._log.open('a')"): "/dev/null",
    ("trackers/tensorboard.py", "(place.directory / name).open('xb')"): "writes a new file",
    ("training/nonfinite_batches.py", "safe_open(file, 'pt')"): "after require_regular",
    ("training/offline/precomputed.py", "safe_open(file, 'pt')"): "after require_regular",
    ("data/picture_files.py", "file.open('rb')"): "a picture of a row",
}


def opening_calls(source: str) -> Iterator[str]:
    """The calls that open a file by something else than the helper's functions."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == HELPER]
    helped = {name.asname or name.name for node in imports for name in node.names}
    for node in ast.walk(tree):
        function = node.func if isinstance(node, ast.Call) else None
        is_method = isinstance(function, ast.Attribute) and function.attr in OPENERS
        if is_method or (isinstance(function, ast.Name) and function.id in OPENERS - helped):
            yield ast.unparse(node)


def test_every_read_of_a_run_goes_through_the_helper():
    found = {
        (path.relative_to(ROOT).as_posix(), call)
        for path in ROOT.rglob("*.py")
        for call in opening_calls(path.read_text(encoding="utf-8"))
    }
    assert {module for module, _ in found if module in NO_FILE_OF_A_RUN} == set(NO_FILE_OF_A_RUN)
    assert {each for each in found if each[0] not in NO_FILE_OF_A_RUN} == set(SAFE)


def test_the_look_finds_what_opens_a_file():
    source = f"from {HELPER} import read_text\nread_text(a)\nopen(a)\na.read_text()\nos.open(a, 0)\nsafe_open(a)\n"
    assert list(opening_calls(source)) == ["open(a)", "a.read_text()", "os.open(a, 0)", "safe_open(a)"]
