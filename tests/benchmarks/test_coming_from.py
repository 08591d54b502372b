"""The coverage of import-command on the peers' examples."""

import json

from benchmarks.coming_from import (
    DOCUMENT,
    Outcome,
    outcome_of,
    quoted,
    swift_examples,
    table_of,
    trl_examples,
    vlm_r1_examples,
)
from benchmarks.tables import RESULTS
from tools.docs.tables import with_table


def test_the_document_has_the_table_of_the_results():
    kept = json.loads((RESULTS / "coming_from.json").read_text())
    outcomes = [
        Outcome(
            peer=each["peer"],
            name=each["name"],
            state=each["state"],
            problems=tuple(each["problems"]),
            silent=tuple(each["silent"]),
        )
        for each in kept["examples"]
    ]
    text = DOCUMENT.read_text()
    assert with_table(text, "coverage", quoted(outcomes, kept["commits"])) == text
    made = [each for each in outcomes if each.state == "recipe"]
    assert sum(not each.problems for each in made) >= 0.95 * len(made)
    assert [each.name for each in made if each.silent] == []


def test_examples_are_found_and_counted(tmp_path):
    (tmp_path / "examples" / "scripts").mkdir(parents=True)
    (tmp_path / "run_scripts").mkdir()
    swift = "swift rlhf --rlhf_type grpo --model org/m --dataset r.jsonl --reward_funcs format"
    (tmp_path / "examples" / "a.sh").write_text(f"MAX_PIXELS=3 {swift} --odd 1\n")
    (tmp_path / "examples" / "b.sh").write_text(f"{swift} --teacher_model t\n")
    (tmp_path / "examples" / "c.sh").write_text("swift sft --model org/Qwen2-VL --dataset r.jsonl --freeze_vit true\n")
    (tmp_path / "examples" / "d.sh").write_text(
        "# swift rlhf --rlhf_type grpo\nswift sft --model org/text --dataset r\n"
    )
    (tmp_path / "run_scripts" / "e.sh").write_text("echo nothing\n")
    script = '"""Usage:\n\npython x/grpo_vlm.py \\\\\n    --model_name_or_path org/m --output_dir o\n"""\n'
    (tmp_path / "examples" / "scripts" / "grpo_vlm.py").write_text(script)
    examples = [*swift_examples(tmp_path), *vlm_r1_examples(tmp_path), *trl_examples(tmp_path)]
    outcomes = [outcome_of(example) for example in examples]
    assert [each.state for each in outcomes] == ["recipe", "refused", "recipe", "no command", "recipe"]
    assert [each.problems for each in outcomes] == [(), (), (), (), ()]
    assert table_of(outcomes).splitlines()[-1] == "| all | 5 | 1 | 1 | 3 | 3 | 3 |"
