"""The benchmark of the vision tower, on a picture of a few patches."""

import json

from benchmarks import vision_tower


def test_it_compares_both_ways(tmp_path, monkeypatch):
    output = tmp_path / "vision_tower.json"
    arguments = ["vision_tower", "--side", "84", "--layers", "1", "--rounds", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", arguments)
    vision_tower.main()
    results = json.loads(output.read_text(encoding="utf-8"))
    assert len(results["parts"]) == 3
    assert all(part["largest_gap"] <= 1e-5 and part["ratio"]["count"] == 1 for part in results["parts"].values())
    assert output.with_suffix(".md").read_text(encoding="utf-8") == vision_tower.markdown(results)
