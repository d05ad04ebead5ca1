"""The comparison with other projects: the same decoder and arithmetic, and a report that says who could not run."""

import json

import peers
import pytest
import torch
from peer_models import Mode, Training, build
from peers import Process, main, ranking
from trainings import write_config

from lm.model.config import DecoderConfig
from lm.model.huggingface import to_huggingface

CPU = torch.device("cpu")
SHAPE = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=48, max_position_embeddings=16)  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"qk_norm": True, "tie_word_embeddings": False}])
def test_transformers_has_the_same_loss_for_the_same_weights(more):
    """Otherwise two different things would be timed."""
    config = DecoderConfig(**SHAPE | more)
    mine, theirs = build("lm:none", config, 16, CPU), build("transformers", config, 16, CPU)
    missing, unexpected = theirs.model.load_state_dict(to_huggingface(mine.model.state_dict(), config), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    theirs.model.tie_weights()
    ids, labels = torch.randint(61, (2, 2, 16))
    torch.testing.assert_close(mine.loss(ids, labels), theirs.loss(ids, labels))
    assert sum(p.numel() for p in mine.model.parameters()) == sum(p.numel() for p in theirs.model.parameters())


def test_a_step_learns_in_every_way_to_run_it():
    """Accumulated over micro-batches."""
    torch.manual_seed(0)
    batches = torch.randint(61, (2, 3, 2, 16)).unbind()
    runs = []
    for name in ("lm:none", "lm:triton_free"):
        torch.manual_seed(1)
        training = Training(build(name, DecoderConfig(**SHAPE), 16, CPU), batches, None)
        runs.append([float(training.step()) for _ in range(5)])
    assert runs[0][-1] < runs[0][0]
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


def test_a_mode_is_read_as_it_is_written():
    assert Mode.parse("triton_free") == ("triton_free", None) and Mode.parse("inductor/off") == ("inductor", "off")
    with pytest.raises(ValueError, match="no mode 'fast'"):
        Mode.parse("fast")


MORTAL = """
from dataclasses import make_dataclass

import torch

NAMES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
GPTConfig = make_dataclass("GPTConfig", NAMES)


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, input_ids, labels):
        self.calls += 1
        if self.calls > 6:  # the warm-up and a turn
            open("seen.json", "w").write(open("peers.json").read())
            raise MemoryError("no memory for the second turn")
        return None, self.weight**2
"""


@pytest.mark.slow
def test_the_command_measures_some_and_names_the_others(tmp_path, monkeypatch, capsys):
    """One breaks between its turns: it is out, and the others take theirs."""
    write_config(tmp_path, **{"trainer.callbacks": None})
    (tmp_path / "model.py").write_text(MORTAL)
    monkeypatch.chdir(tmp_path)
    main(["--config", "small.yaml", "--steps", "1", "--rounds", "2", "--model.decoder.vocab_size", "64", "--contenders",
          "lm:none", "transformers", "nanogpt", "--nanogpt", str(tmp_path), "--output", "peers.json"])  # fmt: skip
    found = json.loads((tmp_path / "peers.json").read_text())
    assert list(found["contenders"]) == ["lm:none", "transformers"]
    reason = "ended in turn 2: MemoryError: no memory for the second turn"
    assert found["unavailable"] == {"nanogpt": reason}
    assert f"nanogpt is unavailable: {reason}" in capsys.readouterr().out
    for figures in found["contenders"].values():
        rate = found["tokens_per_step"] / figures["ms_per_step"] * 1e3
        assert figures["tokens_per_second"] == pytest.approx(rate) and figures["peak_bytes"] > 2**20
    seen = json.loads((tmp_path / "seen.json").read_text())  # what would stay if the second round were cut
    assert seen["rounds"] == 1 and seen["contenders"].keys() == {"lm:none", "transformers", "nanogpt"}
    assert found["rounds"] == 2 and found["best_peer"] == "transformers" and found["ours"] == "lm:none"
    assert found["speed_to_best_peer"] == found["ratios"]["transformers"] > 0


def test_a_contender_that_cannot_begin_says_why_and_takes_no_turn(tmp_path, monkeypatch, capsys):
    """All of what it said is passed on; the report has the last line."""
    (tmp_path / "contender.py").write_text("import json, sys; raise KeyError(json.loads(sys.argv[2])['contender'])")
    monkeypatch.setattr(peers, "__file__", str(tmp_path / "contender.py"))
    gone = Process("nobody", {})
    reason = gone.read()
    assert reason == {"unavailable": "KeyError: 'nobody'"}
    assert "nobody:\nTraceback (most recent call last)" in capsys.readouterr().err
    assert [gone.turn(), gone.turn()] == [reason, reason]  # to a pipe that nobody reads
    gone.end()


def test_ranking_takes_our_fastest_and_the_fastest_of_the_same_architecture():
    """Ratios are taken round by round, so that a machine that slows down does not count."""

    def figures(ms, same=True):
        return {"ms_per_step": ms, "peak_bytes": ms, "same_architecture": same}

    turns = {"lm:none": [9.0, 9.0], "lm:inductor": [2.0, 4.0], "a": [4.0, 8.0], "b": [6.0, 12.0], "c": [1.0, 2.0]}
    named = {"lm:none": figures(9), "lm:inductor": figures(3), "a": figures(6), "b": figures(9), "c": figures(1, False)}
    found = ranking(turns, named)
    assert (found["ours"], found["best_peer"]) == ("lm:inductor", "a")
    assert found["speed_to_best_peer"] == 2.0 and found["memory_to_best_peer"] == 0.5
    assert found["ratios"] == {"a": 2.0, "b": 3.0, "c": 0.5}
