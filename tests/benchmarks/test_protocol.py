"""`protocol.py` knows which trainings are left, and what a difference of losses is."""

import json

from protocol import BATCHES, SCALES, TUNING, Comparison, Text, difference

WHERE = {"depth": 4, "corpus": "manuals", "seed": 1}


def test_what_depends_on_earlier_trainings_comes_after_them(tmp_path):
    file = tmp_path / "trainings.jsonl"
    comparison = Comparison(file, [4], ["manuals"])
    assert {cell["purpose"] for cell in comparison.left()} == {"tuning", "ours"}
    while tuning := [cell for cell in comparison.left() if cell["purpose"] == "tuning"]:
        loss = 1.5 if (tuning[0]["scale"], tuning[0]["batch"]) == (9.0, 4_096) else 1.6
        comparison.add({**tuning[0], "bpb": loss, "cpu_seconds": 100.0})
    assert len(comparison.done) == len(SCALES) * len(BATCHES) * len(TUNING[1:])
    comparison = Comparison(file, [4], ["manuals"])  # in a later process
    assert comparison.best_setting(4) == {"scale": 9.0, "batch": 4_096}
    assert {cell["purpose"] for cell in comparison.left()} == {"ours", "same tokens", "more tokens"}
    for purpose, seconds in (("ours", 100.0), ("same tokens", 200.0)):
        comparison.add({"purpose": purpose, **WHERE, "scale": 9.0, "batch": 4_096, "bpb": 1.4, "cpu_seconds": seconds})
    [more] = [cell for cell in comparison.left() if cell["purpose"] == "more time" and cell["seed"] == 1]
    assert more["tokens"] == round(1.3 * 100 / 200 * 300 * 8_192)
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_a_lost_comparison_is_printed_as_lost(tmp_path):
    comparison = Comparison(tmp_path / "trainings.jsonl", [4], ["manuals"])
    for purpose, bpb in (("ours", 1.4), ("same tokens", 1.45), ("more tokens", 1.39)):
        comparison.add({"purpose": purpose, **WHERE, "bpb": bpb, "cpu_seconds": 1.0})
    row = comparison.table().splitlines()[2]
    assert "| 1.4000 | +0.0500 (+0.0500 to +0.0500) | -0.0100 (-0.0100 to -0.0100) **lost** |  |" in row
    assert difference([0.01, 0.03]).startswith("+0.0200 (+0.0100 to +0.0300)")


def test_a_page_is_its_text():
    page = "<head><title>x</title></head><header>menu</header><h1>A  title</h1><p>One <b>two</b></p><script>no</script><p>Three</p>"
    assert str(Text(page)) == "A title\nOne two\nThree"
