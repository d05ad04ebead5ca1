"""Small tokenizers of every kind that other people train, learned from texts with the `tokenizers` library."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<unk>", "<s>", "</s>"]
BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(texts: Sequence[str]) -> Tokenizer:
    """As GPT-2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder, backend.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    return backend


def word_ends(texts: Sequence[str]) -> Tokenizer:
    """As GPT: a BPE whose words end with `</w>`."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    backend.train_from_iterator(texts, trainer)
    return backend


def wordpiece(texts: Sequence[str]) -> Tokenizer:
    """As BERT: `##` inside of words, lower case, `[CLS]` before and `[SEP]` after a text."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=300, special_tokens=BERT))
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return backend


def unigram(texts: Sequence[str]) -> Tokenizer:
    """As T5: `</s>` is a word of the model, too."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>")
    backend.train_from_iterator(texts, trainer)
    return backend


def word_level(texts: Sequence[str]) -> Tokenizer:
    """Whole words between blanks; others are unknown."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=60, special_tokens=SPECIAL))
    return backend


def llama(texts: Sequence[str]) -> Tokenizer:
    """As Llama 2: blanks are `▁`, also before a text, unknown characters are bytes, and `<s>` begins a text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL + BYTES))
    about = json.loads(backend.to_str())
    about["added_tokens"] = [token for token in about["added_tokens"] if token["content"] in SPECIAL]
    backend = Tokenizer.from_str(json.dumps(about))
    backend.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return backend


def llama3(texts: Sequence[str]) -> Tokenizer:
    """As Llama 3: byte-level, with a token before a text."""
    backend = byte_level(texts)
    backend.add_special_tokens(["<|begin_of_text|>"])
    begin = ("<|begin_of_text|>", backend.token_to_id("<|begin_of_text|>"))
    template = processors.TemplateProcessing(f"{begin[0]} $A", f"{begin[0]} $A {begin[0]} $B", [begin])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def qwen2(texts: Sequence[str]) -> Tokenizer:
    """As Qwen 2: byte-level, each digit by itself. transformers splits so for every Qwen 2, whatever its file says."""
    backend = byte_level(texts)
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(words), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return backend


KINDS: dict[str, Callable[[Sequence[str]], Tokenizer]] = {
    kind.__name__: kind for kind in (byte_level, word_ends, wordpiece, unigram, word_level, llama, llama3, qwen2)
}
CONFIGS = {
    "wordpiece": {"eos_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]"},
    "llama": {
        "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>", "chat_template": "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}",
    },
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"},
}  # fmt: skip


def write_tokenizer(folder: Path, kind: str, texts: Sequence[str]) -> Path:
    """A `tokenizer.json` of a kind in a folder, and the `tokenizer_config.json` that such ones have; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind](texts).save(str(folder / "tokenizer.json"))
    if kind in CONFIGS:
        (folder / "tokenizer_config.json").write_text(json.dumps(CONFIGS[kind]))
    return folder
