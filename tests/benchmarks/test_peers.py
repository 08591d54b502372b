"""tiercel's own driver of the comparison with peers, at toy size. The peers' drivers need their own environments."""

from benchmarks.drivers.measuring import Task
from benchmarks.drivers.tiercel_step import measure
from tests.tiny_models import noise_image


def test_steps_have_the_lengths_and_phases_that_were_asked_for(tiny_checkpoints, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for number in range(3):
        noise_image(84, 56, seed=number).save(images / f"{number:02d}.png")
    task = Task(
        model=tiny_checkpoints["qwen2_5_vl"],
        images=images,
        scratch=tmp_path,
        completion_tokens=5,
        group_size=3,
        questions=2,
        warmup=1,
        steps=2,
    )
    found = measure(task)
    assert found.completion_tokens == [5] * 12
    assert len(found.step_seconds) == len(found.gradient_norms) == 2 and min(found.gradient_norms) > 0
    assert sorted(found.phase_seconds) == ["decode", "learn", "prefill", "preprocess", "vision"]
    for number, seconds in enumerate(found.step_seconds):
        phases = sum(values[number] for values in found.phase_seconds.values())
        assert 0 < phases <= seconds
