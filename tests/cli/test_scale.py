"""`lm scale` is one dial: what it prints is a config that fits, that `lm plan` accepts and that `lm fit` runs."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from processor_time import run_python
from trainings import lm, make_workplace

from lm.cli import request
from lm.cli.command import main
from lm.cli.scale import SMALL, ScaleRequest, scaled_config, shape
from lm.cli.scaling_rules import batch_tokens, make_recipe, tokens_of_steps, weight_decay
from lm.model.estimates import flops_per_token, parameters
from lm.system.units import parse_count
from lm.training.optimizer_rules import RULES, adamw_learning_rate, peak_rate

DEPTHS = range(2, 33)
DEPTH12 = Path(__file__).parent.parent.parent / "configs" / "depth12.yaml"


def scale(*arguments):
    """What `lm scale` prints."""
    with redirect_stdout(StringIO()) as printed:
        assert main(["scale", *map(str, arguments)]) == 0
    return printed.getvalue()


def read(text, folder):
    """A printed config as `lm plan` and `lm fit` parse it."""
    path = folder / "scaled.yaml"
    path.write_text(text)
    return request.read("plan", ["--config", str(path)])


def test_deeper_is_never_smaller():
    made = [make_recipe(shape(depth), tokens_per_parameter=20) for depth in DEPTHS]
    for what in ("parameters", "tokens", "batch", "flops"):
        values = [getattr(one, what) for one in made]
        assert values == sorted(values), what
    widths = [one.decoder.hidden_size for one in made]
    assert widths == sorted(widths) and len(set(widths)) > 10
    by_muon = [one.learning_rate for one in made]
    by_adamw = [adamw_learning_rate(one.decoder, one.block_flops, one.batch_tokens) / one.batch**0.5 for one in made]
    for rates in (by_muon, by_adamw):
        assert rates == sorted(rates, reverse=True)


def test_heads_are_whole_and_the_last_layer_sees_all():
    for depth in DEPTHS:
        decoder = shape(depth)
        assert decoder.hidden_size == 128 * decoder.num_attention_heads
        assert 64 * depth <= decoder.hidden_size < 64 * depth + 128
        assert decoder.windows == [*(None if layer % 4 == 3 else 512 for layer in range(depth - 1)), None]


def test_the_shape_can_be_another_one(tmp_path):
    options = ("--depth", 10, "--aspect_ratio", 96, "--head_dim", 64, "--window_pattern", "SL")
    text = scale(*options)
    decoder = read(text, tmp_path).model.decoder
    assert (decoder.hidden_size, decoder.num_attention_heads, decoder.head_dim) == (960, 15, 64)
    assert decoder.windows == [512, None] * 5
    assert f"lm scale {' '.join(map(str, options))} --output depth10.yaml" in text
    assert "96 x depth, rounded up to whole heads (nanochat: 64)\n" in text
    assert read(scale("--depth", 4, "--window_pattern", "L"), tmp_path).model.decoder.windows == [None] * 4
    assert "num_hidden_layers: 7 " in scale("--depth", "50M", "--max_steps", "100")  # the nearest depth
    for wrong in ("--window_pattern=LX", "--head_dim=0", "--head_dim=63", "--aspect_ratio=-1"):
        assert main(["scale", "--depth", "4", wrong]) == 2


@pytest.mark.parametrize("depth", [2, 5, 12, 26])
def test_each_horizon_comes_out_within_a_step(depth):
    by_ratio = make_recipe(shape(depth), tokens_per_parameter=12.5)
    count = parameters(by_ratio.decoder)["total"] - by_ratio.decoder.vocab_size * by_ratio.decoder.hidden_size
    assert abs(by_ratio.tokens - 12.5 * count) <= by_ratio.batch_tokens / 2
    by_flops = make_recipe(shape(depth), flops=3e18)
    each = flops_per_token(by_flops.decoder, 2_048)
    assert abs(by_flops.tokens * each - 3e18) <= by_flops.batch_tokens * each / 2
    assert make_recipe(shape(depth), steps=777).steps == 777


def test_the_rules_give_their_sources_figures():
    """Figures that others computed or used, so that a wrong constant shows."""
    assert batch_tokens(40e9) == pytest.approx(0.721e6, rel=0.01)  # the fit at 40B tokens, in tokens
    tokens = tokens_of_steps(10_000)
    assert 10_000 * batch_tokens(tokens) == pytest.approx(tokens)
    # At the batch that belongs to it, 3.6M tokens for 4.8e21 operations, the fitted rate is 6e-4.
    assert adamw_learning_rate(None, 4.8e21, 3.6e6) == pytest.approx(6e-4, rel=0.02)
    assert adamw_learning_rate(None, 4.8e21, 4 * 3.6e6) == pytest.approx(2 * adamw_learning_rate(None, 4.8e21, 3.6e6))
    # nanochat's Muon moves a square matrix by its rate of 0.02 times an orthogonal one, ours by lr x 0.2 x sqrt(width).
    assert peak_rate(9.6, 12, 768) * 0.2 * 768**0.5 == pytest.approx(0.02, rel=0.01)
    assert peak_rate(5.06, 12, 1_536) == pytest.approx(9.503e-4, rel=0.01)  # Moonlight's model of 399M parameters
    assert peak_rate(3.0, 4, 128) == pytest.approx(1.12e-2, rel=0.05)  # tiny.yaml
    assert "warmup_steps: 1_430  #" in RULES["adamw"].values(10**5, 2**18)["warmup"]  # 375e6 / 2**18
    assert "warmup_ratio: 0.1  #" in scale("--depth", 4, "--max_steps", 400, "--optimizer", "adamw")
    assert "warmup_steps: 0  #" in scale("--depth", 4, "--max_steps", 499)
    assert "warmup_steps: 40  #" in scale("--depth", 4, "--max_steps", 500)


def test_short_runs_average_over_fewer_steps_and_short_contexts_turn_faster():
    short, long = (yaml.safe_load(scale("--depth", 4, "--max_steps", steps, "--seq_len", length))["model"]
                   for steps, length in ((300, 256), (5_000, 2_048)))  # fmt: skip
    values = [(model["optimizer"]["momentum"], model["optimizer"]["betas"], model["schedule"]["decay_ratio"],
               model["decoder"]["rope_theta"]) for model in (short, long)]  # fmt: skip
    assert values == [(0.85, [0.5, 0.98], 0.5, 1_000), (0.95, [0.8, 0.98], 0.65, 10_000)]
    # The mean of AdamW's updates is over 22 % of a run at 20 tokens a parameter.
    assert RULES["adamw"].memory(20) == pytest.approx(0.2236, rel=1e-3)
    assert weight_decay(0.25, 1e-3, 10_000) == pytest.approx(0.4)


@pytest.mark.parametrize("options, begins", [
    ({"max_steps": 2_000, "vocab_size": 8_192}, True), ({"max_steps": 2_001, "vocab_size": 8_192}, False),
    ({"max_steps": 2_000, "vocab_size": 8_193}, False),
    ({"max_steps": 100, "vocab_size": 4_096, "optimizer": "adamw"}, False),
])  # fmt: skip
def test_short_runs_of_a_small_vocabulary_begin_with_bigrams(options, begins):
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert yaml.safe_load(scale("--depth", 4, *arguments))["trainer"].get("bigram_init", False) == begins


@pytest.mark.parametrize("depth", [2, 3, 5, 8, 12, 17, 24, 32])
def test_a_depth_is_a_config_that_comes_out_even(depth, tmp_path):
    """It parses as `lm fit` parses it, holds the recipe's numbers, and divides by a node's devices."""
    text = scale("--depth", depth)
    assert max(map(len, text.splitlines())) <= 120
    config = read(text, tmp_path)
    made = make_recipe(shape(depth), tokens_per_parameter=20)
    assert config.model.decoder == made.decoder
    assert config.model.optimizer.name == made.optimizer == "muon"
    assert config.model.optimizer.lr == pytest.approx(made.learning_rate, rel=0.005)
    decay = weight_decay(made.memory, made.learning_rate, made.steps)
    assert config.model.optimizer.weight_decay == pytest.approx(decay, rel=0.005)
    for world_size in (1, 2, 4, 8):
        steps = config.steps(world_size)
        assert (steps.max_steps, steps.tokens_per_step) == (made.steps, made.batch_tokens)


@pytest.mark.parametrize("samples", [3, 17, 20, 24, 40])
@pytest.mark.parametrize("length", [("--max_steps", 20), ("--hours", 1, "--device", "h100")])
def test_any_batch_is_whole_micro_batches(samples, length, tmp_path):
    data = read(scale("--depth", 4, "--batch_tokens", samples * 2048, *length), tmp_path).data
    assert data.global_batch_tokens == samples * 2048 and samples % data.micro_batch_size == 0


def test_small_runs_make_sense(tmp_path):
    """A window as long as the context is none, a validation stays a small share, and every printed command runs."""
    text = scale("--depth", 4, "--target_flops", 1e15, "--seq_len", 128, "--vocab_size", 100)
    assert read(text, tmp_path).model.decoder.windows == [None] * 4
    assert "--target_flops 1e+15 " in text and "--tokenizer char\n" in text
    config = read(scale("--depth", 4, "--max_steps", 20), tmp_path)
    assert config.data.val_tokens <= 2 * config.data.global_batch_tokens


def test_the_file_says_how_to_make_it_again(tmp_path):
    text = scale("--depth", 4, "--target_flops", 2e17, "--vocab_size", "16_384", "--optimizer", "adamw")
    command = next(line for line in text.splitlines() if "lm scale" in line)
    again = command.partition("lm scale ")[2].partition(" --output")[0].split()
    assert scale(*again) == text and read(text, tmp_path).model.optimizer.name == "adamw"


def test_standard_output_is_yaml_alone_and_torch_is_not_imported():
    """People redirect it into a file, and it is there at once; it is the preset, which a changed rule changes."""
    code = "import sys\nfrom lm.cli.command import main\nmain(['scale', '--depth', '12'])\nassert 'torch' not in sys.modules"  # fmt: skip
    done, seconds = run_python(code)
    assert seconds < 2  # usually a fifth of a second
    assert done.stderr == "" and done.stdout == DEPTH12.read_text()


@pytest.mark.parametrize("arguments, said", [
    ([], "--depth 12"), (["--depth", "1"], "--depth 1 must be at least 2"),
    (["--depth", "12", "--max_steps", "9", "--target_flops", "1e18"], "--target_flops and --max_steps"),
    (["--depth", "12", "--target_param_data_ratio", "0"], "--target_param_data_ratio 0 must be above 0"),
    (["--depth", "12", "--max_steps", "0"], "--max_steps 0 must be above 0"),
    (["--depth", "12", "--target_flops", "1e9"], "less than one optimizer step"),
    (["--depth", "12", "--vocab_size", "0"], "--vocab_size 0 must be above 0"),
    (["--depth", "12", "--seq_len", "1"], "--seq_len 1 must be at least 2"),
    (["--depht", "12"], "did you mean 'depth'?"),
])  # fmt: skip
def test_a_wrong_request_is_one_line_and_exit_code_2(arguments, said, capsys):
    assert main(["scale", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1


def prepared(folder, tokens, vocab_size=4096):
    """What `scale` reads of a prepared folder."""
    manifest = {"vocab_size": vocab_size, "splits": {"train": {"tokens": tokens}}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return {"data": str(folder)}


def test_a_text_that_is_there_bounds_the_run(tmp_path):
    """Four epochs at most, in another order each; the vocabulary is the tokenizer's. A length that is given stays."""
    data = prepared(tmp_path, 1_000_000)
    made, text = scaled_config(ScaleRequest(depth=8, seq_len=256, **data))
    assert made.tokens == pytest.approx(4e6, rel=0.01) and made.decoder.vocab_size == 4096
    assert yaml.safe_load(text)["data"]["reshuffle"] == "documents" and "4 times the text" in text
    optimizer = yaml.safe_load(text)["model"]["optimizer"]
    assert float(optimizer["lr"]) * optimizer["weight_decay"] * made.steps == pytest.approx(1 / 0.65, rel=0.01)
    for group in optimizer["groups"].values():
        rate = float(optimizer["lr"]) * group["lr_ratio"]
        assert rate * group["weight_decay"] * made.steps == pytest.approx(5, rel=0.01)
    assert scaled_config(ScaleRequest(depth=8, seq_len=256, max_steps=999, **data))[0].steps == 999
    few = scaled_config(ScaleRequest(depth=8, seq_len=256, max_steps=9, batch_tokens=8192, **data))[1]
    assert "reshuffle" not in few
    (tmp_path / "more").mkdir()
    more = prepared(tmp_path / "more", 50_000_000)  # the decay of little text was not measured with so much
    many = yaml.safe_load(scaled_config(ScaleRequest(depth=4, seq_len=256, max_steps=9_999, **more))[1])
    assert many["data"]["reshuffle"] and many["model"]["optimizer"]["groups"]["output"]["weight_decay"] == 0


@pytest.mark.parametrize("tokens", [30_000, 300_000, 3_000_000])
def test_little_text_decides_the_depth(tokens, tmp_path):
    """About ten parameters a token, in the proportions of small models; what is given stays."""
    data = prepared(tmp_path, tokens)
    made, text = scaled_config(ScaleRequest(**data))
    assert made.decoder.max_position_embeddings == 256 and made.decoder.head_dim == 32
    smaller = make_recipe(shape(max(2, made.decoder.num_hidden_layers - 1), ScaleRequest(**SMALL, **data)), steps=9)
    assert smaller.multiplied <= 10 * tokens <= made.multiplied or made.decoder.num_hidden_layers == 2
    assert f"lm scale --depth {made.decoder.num_hidden_layers} --seq_len 256" in text  # makes it again without the data
    assert scaled_config(ScaleRequest(seq_len=128, **data))[0].decoder.max_position_embeddings == 128
    assert made.batch_tokens <= 4096 and (made.steps >= 300 or made.batch == 1)
    assert yaml.safe_load(text)["data"]["micro_batch_size"] == made.batch
    assert yaml.safe_load(text)["trainer"]["devices"] == 1  # others would have no samples


def test_fit_runs_it(tmp_path):
    make_workplace(tmp_path, "data/small")
    printed = lm(tmp_path, "scale", "--depth", "2", "--max_steps", "2", "--vocab_size", "64", "--seq_len", "160",
                 "--data", "data/small")  # fmt: skip
    config = yaml.safe_load(printed.stdout)
    assert config["model"]["decoder"]["sliding_window"] == 128  # less than the context, so there is a window
    assert parse_count(config["data"]["global_batch_tokens"]) % 160 == 0
    (tmp_path / "depth2.yaml").write_text(printed.stdout)
    lm(tmp_path, "plan", "--config", "depth2.yaml", "--strict")
    lm(tmp_path, "fit", "--config", "depth2.yaml")
    assert (tmp_path / "checkpoints" / "depth2" / "step-00000002" / "model.safetensors").is_file()


@pytest.mark.parametrize("tokens, expected", [(2.46e6, 4096), (9.83e6, 8192), (2e8, 131072)])
def test_a_short_run_has_small_steps(tokens, expected):
    """As measured, up to where the published rule has as many steps; a given number of steps has its batch."""
    options = {"depth": 4, "seq_len": 256, "vocab_size": 4096}
    flops = tokens * scaled_config(ScaleRequest(**options, max_steps=1))[0].flops_per_token
    made, text = scaled_config(ScaleRequest(**options, target_flops=flops))
    assert made.batch_tokens == expected and ("for more steps (measured)" in text) == (tokens < 1e7)
    of_steps, text = scaled_config(ScaleRequest(**options, max_steps=made.steps))
    assert of_steps.batch_tokens >= expected / 2 and "nearest to the optimum for this run (arXiv:2505.13738)" in text


def test_a_batch_that_is_given_decides_steps_and_decay():
    options = {"depth": 4, "seq_len": 256, "batch_tokens": 8192, "optimizer": "adamw"}
    made, text = scaled_config(ScaleRequest(**options, max_steps=300))
    assert (made.batch, made.steps, made.tokens) == (32, 300, 300 * 8192)
    assert "8Ki  # 32 samples: as --batch_tokens says" in text
    usual, _ = scaled_config(ScaleRequest(depth=4, seq_len=256, max_steps=300, optimizer="adamw"))
    assert usual.batch > made.batch and usual.memory < made.memory
    assert scaled_config(ScaleRequest(**options))[0].tokens == pytest.approx(20 * made.multiplied, rel=1e-3)


@pytest.mark.parametrize("typed, said", [
    ([], "/train has 195 tokens, and a sample takes 257"),
    (["--seq_len", "32"], "/val has 18 tokens, and a sample takes 33"),
    (["--seq_len", "16", "--vocab_size", "100"], "--vocab_size 100 is less than the 512 of "),
])  # fmt: skip
def test_what_no_training_can_take_of_a_text_is_refused(typed, said, tmp_path, capsys):
    made = {"vocab_size": 512, "splits": {"train": {"tokens": 195}, "val": {"tokens": 18}}}
    (tmp_path / "manifest.json").write_text(json.dumps(made))
    assert main(["scale", "--data", str(tmp_path), *typed]) == 2
    assert said in capsys.readouterr().err
