"""Checks of opened shards before any work: whether there is a sample, and whether packed rows are as long as one."""

from lm.data.shards import Shards
from lm.errors import RequestError


def check_seq_len(shards: Shards, seq_len: int) -> None:
    """RequestError if documents were packed for windows of another length."""
    if shards.packed is not None and shards.packed.seq_len != seq_len:
        raise RequestError(
            f"{shards.source}: documents were packed for samples of {shards.packed.seq_len:,} tokens, and data.seq_len "
            f"(model.decoder.max_position_embeddings) is {seq_len:,}: give --data.seq_len {shards.packed.seq_len}, "
            f"or run `lm data prepare` again with --seq_len {seq_len} and another --output"
        )


def check_windows(shards: Shards, seq_len: int) -> int:
    """The number of windows; RequestError if it is 0."""
    check_seq_len(shards, seq_len)
    index = shards.index
    total = int(index.windows(seq_len).sum())
    if not total:
        largest = max((block.tokens for block in index.blocks), default=0)
        raise RequestError(
            f"{shards.source}: {index.tokens} tokens, at most {largest} of them in one block, but a window takes "
            f"{seq_len + 1} (seq_len + 1): give more data or lower data.seq_len"
        )
    return total
