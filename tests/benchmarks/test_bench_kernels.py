"""`bench_kernels.py` measures every op, and its figures follow from the formulas beside them."""

import contextlib
import io
import json

import pytest
import torch
from bench_kernels import FORMULAS, SMALL, Cases, Sizes, Stopwatch, kernels, show

from lm.errors import RequestError, RunError
from lm.system.arguments import call

QUICK = ("--tokens", "128", "--rounds", "1")


def printed_by(function, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        function(*arguments)
    return out.getvalue()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The JSON object, the file it was written to, and what people are shown."""
    path = tmp_path_factory.mktemp("bench") / "found.json"
    printed = printed_by(call, kernels, [*QUICK, "--inductor", "false", "--json", "--output", str(path)], "bench")
    written = json.loads(path.read_text())
    return json.loads(printed), written, printed_by(show, written)


def test_every_op_of_a_decoder_is_there(found):
    """Those that memory decides pass by pass with a bandwidth, the others as a whole with operations a second."""
    result, written, shown = found
    assert result == written and result["formulas"] == FORMULAS and result["dtype"] == "bfloat16"
    assert result["date"] and result["device"] and "torch" in result["versions"] and result["rounds"] == 1
    moving = {"rms_norm", "qk_norm_rope", "qk_norm_rope, no norm", "swiglu"}
    multiplying = {"norm_linear", "norm_mlp", "linear_cross_entropy", "attention", "attention, window 32",
                   "attention, documents of 32"}  # fmt: skip
    assert result["cases"].keys() == moving | multiplying
    for name, case in result["cases"].items():
        assert name.split(",")[0] in shown
        assert {"forward", "backward"} <= case.keys() if name in moving else "forward_backward" in case


def test_figures_follow_from_the_formulas(found):
    result = found[0]
    copy = result["copy"]["gb_per_second"]
    for case in result["cases"].values():
        for one in ("forward", "backward", "forward_backward"):
            for who in ("ours", "eager") if one in case else ():
                turn = case[one][who]
                if one == "forward_backward":
                    assert turn["tflops"] == pytest.approx(case[one]["operations"] / turn["seconds"] / 1e12)
                else:
                    assert turn["gb_per_second"] == pytest.approx(case[one]["bytes"] / turn["seconds"] / 1e9)
                    assert turn["of_copy_rate"] == pytest.approx(turn["gb_per_second"] / copy)


def test_bytes_are_those_of_inputs_and_results():
    """What the formula counts is what the tensors hold."""
    cases = Cases(SMALL, torch.bfloat16, torch.device("cpu"))
    for case in cases.all():
        if case.forward is None:
            continue
        inputs = [value for value in case.inputs() if isinstance(value, torch.Tensor)]
        results = case.ours(*case.inputs())
        results = results if isinstance(results, tuple) else (results,)
        assert sum(case.forward.reads.values()) == sum(value.nbytes for value in inputs), case.name
        extra = case.forward.writes.get("rstd", 0)
        assert sum(case.forward.writes.values()) - extra == sum(value.nbytes for value in results), case.name


def test_the_inputs_of_all_sets_fit_into_the_memory_of_a_gpu():
    """With the cache of an H100. An op without counted traffic once took 209,715,200 sets."""
    stopwatch = Stopwatch(torch.device("cpu"))
    stopwatch.cache_bytes = 50 * 2**20
    for case in Cases(Sizes(), torch.bfloat16, torch.device("meta")).all():
        assert stopwatch.input_sets(case.forward) < 10 and stopwatch.input_sets(case.backward) < 10
    assert stopwatch.input_sets(None) == 1


def test_operations_are_those_that_torch_counts():
    """Two for each multiplication and addition of the matrix products, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    for case in (Cases(SMALL, torch.float32, torch.device("cpu")).norm_linear(),
                 Cases(SMALL, torch.float32, torch.device("cpu")).cross_entropy()):  # fmt: skip
        inputs = case.inputs()
        with FlopCounterMode(display=False) as counted:
            results = case.plain(*inputs)
            total = sum(result.float().sum() for result in results if result.requires_grad)
            total.backward()
        assert counted.get_total_flops() == case.operations, case.name


def test_a_compiler_that_is_missing_is_said_and_the_rest_is_measured(monkeypatch):
    """Inductor needs one on a CPU, too; it is looked for in the first call."""

    def missing(*arguments):
        raise RuntimeError("no C++ compiler\nand more lines")

    monkeypatch.setattr(torch, "compile", lambda function, **options: missing)
    shown = printed_by(call, kernels, [*QUICK, "--dtype", "fp32"], "bench")
    assert "inductor is unavailable: RuntimeError: no C++ compiler\n" in shown and "norm_mlp" in shown


def test_an_op_that_breaks_does_not_take_the_others_along(monkeypatch, tmp_path, capsys):
    """Its reason stands in its place, the file is written, and the command fails."""

    def one_breaks(cases):
        def refuse(*inputs):
            raise RuntimeError("no such kernel\nand more")

        whole = cases.rms_norm()
        return [whole, whole._replace(name="broken", ours=refuse)]

    monkeypatch.setattr(Cases, "all", one_breaks)
    with pytest.raises(RunError, match="^broken could not be measured"):
        kernels(tokens=128, rounds=1, inductor=False, output=tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())["cases"]
    assert found["broken"]["unavailable"] == "RuntimeError: no such kernel" and found["rms_norm"]["forward"]["ours"]
    assert "broken is unavailable: RuntimeError: no such kernel" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--tokens", "100"), ("--rounds", "0"), ("--dtype", "int8")])
def test_a_wrong_request_is_one_line(option):
    with pytest.raises(RequestError, match=f"{option[0].strip('-')}.*") as refused:
        call(kernels, [*QUICK, *option], "bench")
    assert "\n" not in str(refused.value)
