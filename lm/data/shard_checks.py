"""Checks of opened shards before any work: whether they have a sample, a target, and room in the shuffle buffer."""

from contextlib import suppress

from lm.data.parquet import IGNORED, BadBlock
from lm.data.shards import Shards
from lm.errors import RequestError
from lm.system.units import plural


def check_seq_len(shards: Shards, seq_len: int) -> None:
    """RequestError if documents were packed for windows of another length."""
    if shards.packed is not None and shards.packed.seq_len != seq_len:
        raise RequestError(
            f"{shards.source}: documents were packed for samples of {shards.packed.seq_len:,} tokens, and data.seq_len "
            f"(model.decoder.max_position_embeddings) is {seq_len:,}: give --data.seq_len {shards.packed.seq_len}, "
            f"or run `lm data prepare` again with --seq_len {seq_len} and another --output"
        )


def check_windows(shards: Shards, seq_len: int, limit: int | None = None) -> int:
    """The number of windows; RequestError if it is 0, or if the first `limit` windows (or all) have no target."""
    index = shards.index
    if not index.tokens:
        raise RequestError(
            f"{shards.source} holds no token: it has no rows, or all of them are empty or padding (`attention_mask` 0, "
            "data.pad_id)"
        )
    check_seq_len(shards, seq_len)
    total = int(index.windows(seq_len).sum())
    if not total:
        raise RequestError(
            f"{shards.source}: {index.tokens} tokens, at most {index.largest.tokens} of them in one block, but a "
            f"window takes {seq_len + 1} (seq_len + 1): give more data or lower data.seq_len"
        )
    limit = min(limit or total, total)
    has_labels = any(shard.labels for shard in shards.by_file.values())  # otherwise each window has targets
    if has_labels and not _has_target(shards, seq_len, limit):
        raise RequestError(
            f"{shards.source}: each label of the first {plural(limit, 'window')} is {IGNORED}, so there is no loss; "
            "take more tokens, name other files, or leave `labels` out"
        )
    return total


def _has_target(shards: Shards, seq_len: int, limit: int) -> bool:
    """Whether one of the first `limit` windows has a target, ignoring blocks that cannot be read."""
    stride = shards.index.stride(seq_len)
    for block, count in enumerate(shards.index.windows(seq_len).tolist()):
        if limit <= 0:
            return False
        with suppress(BadBlock):  # the next read will report it
            targets = shards.read_tokens(block).targets
            if targets is None or targets[1 : min(limit, count) * stride + 1].any():
                return True
        limit -= count
    return False


def check_buffer(shards: Shards, shuffle_buffer: int) -> None:
    """RequestError if a block has more tokens than the shuffle buffer."""
    largest = shards.index.largest
    if largest.tokens > shuffle_buffer:
        raise RequestError(
            f"{largest}: {largest.tokens} tokens in one piece, more than data.shuffle_buffer ({shuffle_buffer}); raise "
            "data.shuffle_buffer, or write the shard again with smaller row groups (`lm data prepare`)"
        )
