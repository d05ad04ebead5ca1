"""`bench_loader.py` writes data that the loader reads."""

import bench_loader

from lm.data.shards import Shards


def test_the_data_is_written_and_read(tmp_path):
    """As shards of a mixture and of a stream, and as the flat file of the same tokens."""
    bench_loader._write(tmp_path, 600_000)
    flat = (tmp_path / "flat.bin").stat().st_size // 2
    assert flat == Shards.open(str(tmp_path / "train")).index.tokens == 600_000
    for batches in (bench_loader._stream(Shards.open(str(tmp_path / "train"))), bench_loader._mixture(tmp_path, 4)):
        assert next(batches).input_ids.shape == (bench_loader.ROWS, bench_loader.SEQ_LEN)
        batches.close()
    found = bench_loader._first_batch(tmp_path, 1)
    assert found["first_batch_s"] > 0 and found["first_batch_footers_s"] > 0
