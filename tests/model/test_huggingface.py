"""A checkpoint folder is a Hugging Face model: the same logits there, the same weights back, nothing lost."""

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from decoders import SHAPES, SMALL, trained_like, write_huggingface
from transformers import AutoModelForCausalLM, LlamaConfig, MinistralConfig, Qwen2Config, Qwen3Config

from lm.errors import RequestError
from lm.model.decoder import Decoder
from lm.model.huggingface import check_tied, config_from_json, config_json, from_huggingface, to_huggingface


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def config(request):
    return request.param


def test_from_pretrained_gives_the_same_logits_and_loss(config, tmp_path):
    model = trained_like(config)
    theirs, report = AutoModelForCausalLM.from_pretrained(write_huggingface(model, tmp_path), output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    qwen = "Qwen3" if config.qk_norm else "Qwen2" if config.attention_bias else None
    expected = qwen or ("Ministral" if config.window_pattern else "Llama")
    assert type(theirs).__name__ == f"{expected}ForCausalLM"
    assert theirs.dtype == torch.float32
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == 7
    for name in ("max_position_embeddings", "initializer_range"):  # which no logit shows
        assert getattr(theirs.config, name) == getattr(config, name)
    ids = torch.randint(config.vocab_size, (3, 64))
    with torch.no_grad():
        ours, reference = model(ids), theirs.eval()(ids, labels=ids)
        loss = model(ids[:, :-1], labels=ids[:, 1:]).per_token.mean()
    assert reference.logits.std() > 0.1  # the comparison is of something
    torch.testing.assert_close([ours, loss], [reference.logits, reference.loss], atol=1e-5, rtol=1e-5)


def test_config_json_and_back_is_the_same_shape(config):
    document = json.loads(json.dumps(config_json(config, None, "float32")))
    assert config_from_json(document) == config
    assert config_from_json(config_json(replace(config, dropout=0.1), None, "float32")) == config


@pytest.mark.parametrize("theirs", [
    LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=64, num_attention_heads=4, rms_norm_eps=1e-6),
    Qwen3Config(architectures=["Qwen3ForCausalLM"], hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
    Qwen2Config(architectures=["Qwen2ForCausalLM"], hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
], ids=["llama", "qwen3", "qwen2"])  # fmt: skip
def test_configs_that_transformers_writes_are_read(theirs):
    ours = config_from_json(json.loads(theirs.to_json_string(use_diff=False)))
    own = {"rope_theta", "rope_scaling", "qk_norm", "attention_bias", "dropout", "window_pattern", "sliding_window",
           "zero_init_residual"}  # fmt: skip
    for name in asdict(ours).keys() - own:
        assert getattr(ours, name) == getattr(theirs, name, 16), name  # a Qwen 2 has no head_dim
    assert ours.rope_theta == 10000.0 and ours.attention_bias is isinstance(theirs, Qwen2Config)


BARE = {
    "vocab_size": 10, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 8,
    "max_position_embeddings": 16,
}  # fmt: skip


def test_a_short_config_takes_hugging_faces_defaults():
    llama = {**BARE, "architectures": ["LlamaForCausalLM"]}
    for given in ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        assert config_from_json({**llama, **given}).rope_theta == 5e5  # the second since transformers 5
    config = config_from_json(llama)
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize("theirs, document", [
    (MinistralConfig, {}), (MinistralConfig, {"sliding_window": None}), (MinistralConfig, {"sliding_window": 7}),
    (Qwen3Config, {}), (Qwen3Config, {"sliding_window": 7}), (Qwen3Config, {"use_sliding_window": True}),
    (Qwen3Config, {"use_sliding_window": True, "max_window_layers": 2}),
    (Qwen3Config, {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 7}),
])  # fmt: skip
def test_windows_are_read_as_transformers_reads_them(theirs, document):
    architecture = theirs.__name__.replace("Config", "ForCausalLM")
    document = {**BARE, "num_key_value_heads": 2, **document, "architectures": [architecture]}
    read = theirs.from_dict(dict(document))
    expected = [read.sliding_window if kind == "sliding_attention" else None for kind in read.layer_types]
    assert config_from_json(document).windows == expected


@pytest.mark.parametrize("pattern", ["LLLSS", "S", "LLLLS", None])
def test_qwen3_says_its_windows_without_layer_types_too(pattern):
    """Readers that know only `max_window_layers` see the same, where all layers after the first window have one."""
    windows = {"window_pattern": pattern, "sliding_window": 9 if pattern else None}
    config = replace(SMALL, num_hidden_layers=5, qk_norm=True, **windows)
    document = config_json(config, None, "float32")
    kinds = document.pop("layer_types")
    assert Qwen3Config.from_dict(dict(document)).layer_types == kinds
    assert config_from_json(document) == config


@pytest.mark.parametrize("change, named", [
    ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    ({"architectures": None}, "architectures"), ({"model_type": "mistral"}, "model_type is mistral"),
    ({"architectures": ["MinistralForCausalLM"], "model_type": "ministral", "sliding_window": None,
      "layer_types": ["sliding_attention"] * 3}, "give model.decoder.sliding_window"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor': None.* must be"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "'factor': '2'.* must be"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": math.nan}}, "'factor': nan.* must be"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_scaling is .*yarn"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "rope_scaling is .*full_attention"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"attention_bias": True}, "attention_bias"), ({"mlp_bias": True}, "mlp_bias"),
    ({"hidden_act": "gelu"}, "hidden_act is gelu"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has chunked_attention"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_size": None}, "lacks hidden_size"), ({"rms_norm_eps": None}, "lacks rms_norm_eps"),
    ({"rope_theta": None}, "lacks rope_theta"),
])  # fmt: skip
def test_what_this_decoder_cannot_be_is_refused_by_name(change, named):
    with pytest.raises(RequestError, match=named):
        config_from_json({**config_json(SMALL, None, "float32"), **change})


@pytest.mark.parametrize("change, named", [
    ({"num_hidden_layers": 4}, "lack model.layers.3"), ({"num_hidden_layers": 2}, "hold model.layers.2"),
    ({"tie_word_embeddings": False}, "lack lm_head.weight"),
])  # fmt: skip
def test_weights_of_another_shape_are_refused_by_name(change, named):
    state = to_huggingface(trained_like(SMALL).state_dict(), SMALL)
    with pytest.raises(RequestError, match=named):
        from_huggingface(state, replace(SMALL, **change))


@pytest.mark.parametrize("source", ["twice", "output alone", "another"])
def test_a_tied_output_matrix_is_the_embedding_by_either_name(source):
    state = to_huggingface(trained_like(SMALL).state_dict(), SMALL)
    embedding = state["lm_head.weight"] = state["model.embed_tokens.weight"]
    embedding[0, 0] = torch.nan  # of a training that went wrong
    if source == "another":
        state["lm_head.weight"] = embedding + 1e-3
        with pytest.raises(RequestError, match="lm_head.weight is not model.embed_tokens.weight.* ties them: set"):
            from_huggingface(state, SMALL)
        return
    if source == "output alone":
        del state["model.embed_tokens.weight"]
    weights = from_huggingface(state, SMALL)
    assert "lm_head.weight" not in weights and weights["embed_tokens.weight"] is embedding
    check_tied(Decoder(SMALL), weights)
