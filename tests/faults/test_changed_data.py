"""A resume on other data is refused with the difference; a resume on other ranks sees the same samples."""

import shutil

import pytest
from trainings import equipment, expected, fit, lm, losses, rows_by_step, write_config


@pytest.mark.fault(13)
def test_ranks_and_micro_batches_may_change_at_every_stop(workplace):
    """One process, two ranks, other micro-batches, one process again: each step has its samples."""
    divisions = {
        3: {}, 5: {"trainer.devices": 2, "data.micro_batch_size": 2}, 7: {"data.micro_batch_size": 1},
        9: {"data.micro_batch_size": 8}, 10: {"trainer.devices": 2, "trainer.strategy": "fsdp2"}, 12: {},
    }  # fmt: skip
    for last, division in divisions.items():
        _, run = fit(workplace, "divided", "--ckpt_path", "auto", **{"trainer.max_steps": last, **division})
    assert rows_by_step(*workplace.glob("trace*.jsonl")) == rows_by_step(workplace / "expected.jsonl")
    assert [line["step"] for line in run.metrics() if "train/loss" in line] == list(range(1, 13))
    assert not (workplace / "checkpoints" / "divided-2").exists()


@pytest.mark.fault(11)
def test_other_shards_are_refused_with_the_difference_until_they_are_put_back(workplace):
    """One added, one removed, one changed and as long as it was, a folder made anew: exit 2, and no step is taken."""
    fit(workplace, expect=-9, callbacks=[equipment("recorder.KillAt", signal_name="SIGKILL", micro_batch=9)])
    resume = ("fit", "--config", str(write_config(workplace)), "--ckpt_path", "auto")
    data, whole = workplace / "data/small", workplace / "whole"
    shutil.copytree(data, whole)
    shard = data / "train/00000.parquet"

    def add():
        shutil.copy(shard, data / "train/00001.parquet")

    def change():
        content = bytearray(shard.read_bytes())
        content[-200] ^= 1  # in the footer, where no checksum of a page is
        shard.write_bytes(content)

    def prepare_again():
        first, *_ = sorted((workplace / "texts").glob("*.txt"))
        shutil.copytree(workplace / "texts", workplace / "other/texts")
        (workplace / "other/texts" / first.name).write_text(first.read_text().replace("letter", "better"))
        shutil.rmtree(data)
        lm(workplace, "data", "prepare", "--input", "other/texts", "--output", str(data), "--tokenizer", "char",
           "--val_fraction", "0.2")  # fmt: skip

    for damage, said in (
        (add, "00001.parquet is not in its manifest"), (shard.unlink, "which is missing; fetch it, or remove"),
        (change, "00000.parquet: cannot be decoded (its footer is not the one"), (prepare_again, "00000.parquet"),
    ):  # fmt: skip
        damage()
        refused = lm(workplace, *resume, expect=2)
        assert said in refused.stderr.splitlines()[-1] and "Traceback" not in refused.stderr
        shutil.rmtree(data)
        shutil.copytree(whole, data)
    assert "the shards changed since checkpoints/small was started" in refused.stderr
    record = workplace / "checkpoints/small/data.json"
    text = record.read_text()
    record.write_text(text[:50])
    refused = lm(workplace, *resume, expect=2)
    assert "data.json is damaged, so it is not known which shards" in refused.stderr.splitlines()[-1]
    record.write_text(text)
    lm(workplace, *resume)
    assert losses(workplace) == expected(workplace)


@pytest.mark.fault(12)
def test_a_tokenizer_or_vocabulary_that_does_not_match_is_refused_before_the_first_step(workplace):
    """One that did not make the shards, a model with fewer rows, and data of another tokenizer on a resume."""
    refused, _ = fit(workplace, "few", expect=2, **{"model.decoder.vocab_size": 3})
    assert "smaller than the tokenizer's" in refused.stderr
    lm(workplace, "data", "prepare", "--input", "texts", "--output", "data/other", "--tokenizer", "bpe",
       "--vocab_size", "300", "--val_fraction", "0.2")  # fmt: skip
    refused, _ = fit(workplace, "mixed", expect=2, **{"data.tokenizer": "data/other"})
    assert "was made with another tokenizer" in refused.stderr.splitlines()[-1]
    assert not (workplace / "checkpoints").exists() and not (workplace / "trace.jsonl").exists()
    _, run = fit(workplace, **{"trainer.max_steps": 1, "model.schedule.warmup_steps": 0})
    other = str(write_config(workplace, "small", **{"data.path": "data/other", "data.prepare": None}))
    for force, said in {(): "cannot be resumed with other options: data.path was ", ("--force",): "checkpoint"}.items():
        refused = lm(workplace, "fit", "--config", other, "--ckpt_path", "auto", *force, expect=2)
        assert said in refused.stderr.splitlines()[-1]
    assert run.read("state.json")["step"] == 1
