"""The lines of docs/from-a-run.md that load an adapter by transformers and PEFT, and those without PEFT that load a
merged model: they answer as tiercel does."""

import pytest
from PIL import Image

import tiercel as tc
from tests.docs.pages import DOCS, blocks
from tiercel.demo.pointing import START

QUESTION = "Where is the cup?"
LONGEST_LINES = 14  # with the imports


def program() -> str:
    (found,) = [text for text in blocks(DOCS / "from-a-run.md", "python") if "PeftModel" in text]
    return found


def test_it_is_short():
    assert len(program().splitlines()) <= LONGEST_LINES


def test_the_answer_is_that_of_the_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torchvision")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    picture = Image.new("RGB", (112, 112), "white")
    picture.save("a.png")
    turns = [{"role": "user", "content": f"<image>{QUESTION}"}, {"role": "assistant", "content": "[28, 28, 84, 84]"}]
    run = tc.sft(
        model={"path": START, "dtype": "float32"},
        data=[{"messages": turns, "images": [picture]}] * 8,
        lora={"rank": 8},
        optim={"prompts_per_step": 8, "lr": 1e-3},
        steps=2,
        output="runs/rec",
    )
    run.export("runs/rec/adapter", merge=False)
    run.export("runs/rec/model")
    said = tc.load(run).generate(QUESTION, images=["a.png"], max_new_tokens=64).text
    without_peft = "\n".join(line for line in program().splitlines() if "Peft" not in line)
    for base, text in ((str(START), program()), ("runs/rec/model", without_peft)):
        capsys.readouterr()
        exec(compile(text.replace("Qwen/Qwen2.5-VL-3B-Instruct", base), "from-a-run.md", "exec"), {})
        assert capsys.readouterr().out.splitlines()[-1] == said
