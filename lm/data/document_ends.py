"""Whether a model can learn from the training data where documents end."""

from lm.data.parquet import BadBlock
from lm.data.shards import Shards
from lm.data.tokenizer import END_OF_TEXT, Tokenizer

DECODED_TOKENS = 2**16  # where no document ends in as many, none may


def describe_ends(shards: Shards, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """What is wrong with the ends of documents in the first block, and what to do; None if nothing is."""
    try:
        ids, targets = shards.read_tokens(0)
    except (BadBlock, IndexError):  # reported by the next read, or there is nothing
        return None
    ends = ids == tokenizer.eos_id
    beginning = ids[:DECODED_TOKENS]
    text = tokenizer.decode(beginning[~ends[:DECODED_TOKENS]])
    name = max({tokenizer.eos_token, END_OF_TEXT}, key=text.count)
    if text.count(name) >= max(2, ends[:DECODED_TOKENS].sum() // 2):
        return (
            f"the text of {shards.source} has {name} {text.count(name):,} times in its first {len(beginning):,} tokens "
            "and ends no document there: the model will write it and not stop",
            "make a JSON line of each text between, and prepare these",
        )
    made_by_lm = any(shard.text_ratio for shard in shards.by_file.values())  # it may be a single document
    if made_by_lm or len(ids) < DECODED_TOKENS or (ends if targets is None else ends & targets).any():
        return None
    return (
        f"no document ends in the first {len(ids):,} tokens of {shards.source}: the model will never stop",
        f"end each with {tokenizer.eos_token} ({tokenizer.eos_id}), its attention_mask 1 and its label not -100",
    )


def answers_end_documents(shards: Shards, tokenizer: Tokenizer) -> bool:
    """Whether the end-of-text token also ends answers inside of conversations, by the chat template."""
    template = str(tokenizer.config.get("chat_template"))
    by_lm = any(shard.labels and shard.packed for shard in shards.by_file.values())
    return by_lm and ("eos_token" in template or tokenizer.eos_token in template)
