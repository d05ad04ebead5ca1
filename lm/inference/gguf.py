"""`lm export --format gguf`: the file of a model that llama.cpp, Ollama and LM Studio run.

It holds the weights, the shape and the tokenizer. llama.cpp knows a model by the name of an architecture, and a
tokenizer by the name of the expression that splits a text into words: here by one with which this tokenizer gives the
same ids. A model that llama.cpp would compute otherwise is refused. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from lm.data.chat import template_of
from lm.data.encoder import hard_texts
from lm.data.tokenizer import Tokenizer, token_name
from lm.data.tokenizer_training import split_words
from lm.errors import RequestError
from lm.inference.pretrained import Pretrained
from lm.model.config import DecoderConfig
from lm.model.decoder import rope_frequencies
from lm.model.huggingface import architecture_name, to_huggingface
from lm.system.parsing import read_object

log = logging.getLogger(__name__)

CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + REST
# llama.cpp's names (src/llama-vocab.cpp) -> expressions that split a text in turn, whether whole words are looked up
WORDS = {
    "smaug-bpe": ([LLAMA3], False),
    "llama-bpe": ([LLAMA3], True),
    "qwen2": ([CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + REST], False),
    "gpt-2": ([GPT2], False),
    "smollm": ([r"\p{N}", GPT2], False),
}
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}  # ours -> GGUF's


def write_gguf(model: Pretrained, file: Path, dtype: str, about: dict[str, Any]) -> None:
    """Write the file of a model.

    Args:
        model: what to write; its weights are read in fp32.
        dtype: of the matrices, a key of `DTYPES`; vectors are fp32, and so is a matrix whose rows q8_0 cannot divide.
        about: what is known of `name`, `license` and `languages`.
    """
    try:
        import gguf
    except ImportError as error:
        raise RequestError("--format gguf needs `pip install gguf`") from error
    config, tokenizer = model.config, model.tokenizer
    check_llama_cpp_has(config)
    architecture = gguf.MODEL_ARCH[kind_of(config).upper()]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    for name, value in about.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_file_type(gguf.LlamaFileType[f"{'ALL' if dtype == 'float32' else 'MOSTLY'}_{DTYPES[dtype]}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_shape(writer, config)
    add_tokenizer(writer, tokenizer, int(config.vocab_size))
    generation = model.path / "generation_config.json"
    ends = read_object(generation).get("eos_token_id") if generation.exists() else None
    for end in ends if isinstance(ends, list) else ():
        if end != tokenizer.eos_id:  # of an answer, as `<|eot_id|>` of Llama 3
            writer.add_eot_token_id(end)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    matrices, in_fp32 = 0, 0
    for name, weight in weights(config, model.decoder.state_dict()):
        kind = gguf.GGMLQuantizationType[DTYPES[dtype] if weight.ndim > 1 else "F32"]
        block = gguf.GGML_QUANT_SIZES[kind][0]
        if weight.shape[-1] % block:
            kind, in_fp32 = gguf.GGMLQuantizationType.F32, in_fp32 + 1
        matrices += weight.ndim > 1
        data = gguf.quantize(weight.float().contiguous().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")) or name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if in_fp32:
        log.info("%d of %d matrices stay in fp32: %s needs rows of a multiple of 32", in_fp32, matrices, dtype)


def kind_of(config: DecoderConfig) -> str:
    """The architecture of llama.cpp for a decoder; with windows as long as the context it is a Llama's."""
    name = architecture_name(config)
    return name if name in ("Qwen2", "Qwen3") else "Llama"


def check_llama_cpp_has(config: DecoderConfig) -> None:
    """Raise RequestError for what no architecture of llama.cpp computes."""
    kind = kind_of(config)
    if any(window and window < config.max_position_embeddings for window in config.windows):
        raise RequestError(
            f"llama.cpp has no sliding windows in a {kind}: a model with model.decoder.window_pattern "
            f"{config.window_pattern} can only be exported to Hugging Face's format"
        )
    if config.rope_scaling and config.rope_scaling["rope_type"] == "llama3" and kind != "Llama":
        raise RequestError(f"llama.cpp has the rope_scaling llama3 in a Llama, not in a {kind}")


def add_shape(writer: Any, config: DecoderConfig) -> None:
    import gguf

    writer.add_vocab_size(int(config.vocab_size))
    writer.add_context_length(int(config.max_position_embeddings))
    writer.add_embedding_length(int(config.hidden_size))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(int(config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(int(config.num_key_value_heads))
    writer.add_key_length(int(config.head_dim))
    writer.add_value_length(int(config.head_dim))
    writer.add_rope_dimension_count(int(config.head_dim))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    scaling = config.rope_scaling or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])


def weights(config: DecoderConfig, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face's names, with their values as llama.cpp has them.

    llama.cpp's Llama rotates neighbouring pairs of a head (0, 1), (2, 3), ..., where Hugging Face's and every Qwen
    rotate (0, d / 2), (1, d / 2 + 1), ...: the rows of the matrices of queries and keys are put in that order.
    """
    half = int(config.head_dim) // 2
    for name, weight in to_huggingface(state, config).items():
        if kind_of(config) == "Llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = weight.unflatten(0, (-1, 2, half)).transpose(1, 2).reshape(weight.shape)
        yield name, weight
    if config.rope_scaling and config.rope_scaling["rope_type"] == "llama3":
        plain, scaled = (
            rope_frequencies(int(config.head_dim), config.rope_theta, torch.device("cpu"), scaling)
            for scaling in (None, config.rope_scaling)
        )
        yield "rope_freqs.weight", plain / scaled


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def add_tokenizer(writer: Any, tokenizer: Tokenizer, rows: int) -> None:
    """Write the tokens, and unused ones for the rows of the embedding that have no token."""
    import gguf

    description = tokenizer.description["model"]
    tokens = [f"[UNUSED{number}]" for number in range(rows)]
    kinds = [gguf.TokenType.UNUSED] * rows
    added = tokenizer.backend.get_added_tokens_decoder()
    for token, number in tokenizer.vocabulary.items():
        special = number in added and added[number].special
        kinds[number] = gguf.TokenType.CONTROL if special else gguf.TokenType.NORMAL
        if number in added and not special:
            kinds[number] = gguf.TokenType.USER_DEFINED
        tokens[number] = token
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in description.get("merges", [])]
    writer.add_tokenizer_pre(words_name(tokenizer))
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokenizer.eos_id)
    # Without a token of its own for the beginning, what ends a document begins the next.
    bos_id = tokenizer.vocabulary.get(token_name(tokenizer.config.get("bos_token")) or "", tokenizer.eos_id)
    writer.add_bos_token_id(bos_id)
    writer.add_add_bos_token(tokenizer.backend.encode("").ids[:1] == [bos_id])
    if template := template_of(tokenizer):
        writer.add_chat_template(template)


def words_name(tokenizer: Tokenizer) -> str:
    """llama.cpp's name of the expression with which it gives the same ids; RequestError if it has none."""
    description, model = tokenizer.description, tokenizer.description["model"]
    if not tokenizer.byte_level or model.get("type") != "BPE" or description.get("normalizer"):
        raise RequestError(
            "llama.cpp reads the byte-level BPE of GPT-2, Llama 3 and Qwen, which `lm data prepare --tokenizer bpe` "
            "makes; this model's tokenizer is another one"
        )
    texts = hard_texts()
    ids = tokenizer.encode_batch(texts)
    for name, (expressions, whole_words) in WORDS.items():
        if bool(model.get("ignore_merges")) == whole_words and _splitting(description, expressions, texts) == ids:
            return name
    raise RequestError("llama.cpp splits no text into words as this model's tokenizer does: it would see other ids")


def _splitting(description: dict[str, Any], expressions: list[str], texts: list[str]) -> list[list[int]]:
    """Ids of texts by a tokenizer's BPE, if it splits by expressions in turn, as llama.cpp does."""
    unused = dict.fromkeys(("post_processor", "truncation", "padding"))
    backend = tokenizers.Tokenizer.from_str(json.dumps({**description, **unused, "added_tokens": []}))
    backend.pre_tokenizer = split_words(*expressions)
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
