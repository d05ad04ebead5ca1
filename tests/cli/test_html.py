"""A run as one HTML page: whole, safe to open, small, and in a real browser where one is installed."""

import base64
import hashlib
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from run_folders import write_live_run, write_run
from trainings import lm, make_workplace, write_config

from lm.cli.report.run import OPENING
from lm.cli.runs_compare import export
from lm.errors import RequestError
from lm.runs.run import Run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVIL = '</script><img src=x onerror="window.hacked = 1">\'&amp;'
VOID = {"meta", "link", "input", "img", "br"}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LM_REGISTRY", str(tmp_path / "runs.db"))
    return tmp_path


class Page(HTMLParser):
    """A page as a browser without scripts reads it; fails where elements do not end in order."""

    def __init__(self, file: Path | str) -> None:
        super().__init__()
        self.source = Path(file).read_text(encoding="utf-8")
        self.tags, self.attributes, self.text, self.scripts, self._open = [], [], "", [], []
        self.feed(self.source)
        self.close()
        assert self._open == []
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._open += [] if tag in VOID else [tag]
        self.scripts += [""] if tag == "script" else []

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] == ["script"]:
            self.scripts[-1] += data
        elif self._open[-1:] != ["style"]:
            self.text += data

    def curves(self) -> dict[tuple[str, str], dict]:
        """The curves by the title of their chart and their label."""
        return {(chart["title"], curve["label"]): curve for chart in self.data["charts"] for curve in chart["curves"]}


def page_of(run: Run, file: str = "page.html") -> Page:
    export(str(run.path), html=file)
    return Page(file)


def make_rich_run(root: Path, name: str = "reich-λ") -> Run:
    """A run with a mixture, metrics of its own, NaN, a resume, a rollback, and text that would like to be markup."""
    run = write_live_run(root, name, lines=120, alerts=2, sources=("speeches", EVIL))
    lines = run.metrics()
    (run.path / "metrics.jsonl").unlink()
    for line in lines:
        if line["step"] == 610:
            run.mark_resume(600)
        extra = {"train/loss/speeches": 3.0, f"train/loss/{EVIL}": 4.0, "mine/entropy": math.sin(line["step"]),
                 "perf/gpu_load": 97.0}  # fmt: skip
        extra |= {"train/loss": math.nan} if line["step"] in (300, 310) else {}
        run.append("metrics.jsonl", {**line, **(extra if "train/loss" in line else {})})
    run.describe(note=f"A note {EVIL}", tags=["first", EVIL], rollbacks=[{"step": 900, "to": 800}],
                 reason=EVIL, command=["__main__.py", "fit", "--on_event", "[post, https://hooks.example/T0/B0]",
                                       "--data.path", "s3://me:pass@bucket/data?signature=abc"])  # fmt: skip
    run.config.write_text(yaml.safe_dump({
        "on_event": ["post", "https://hooks.example/T0/B0"], "model": {"decoder": {"hidden_size": 77}, "document_mask": False},
        "data": {"path": "s3://me:pass@bucket/data?signature=abc", "shuffle_buffer": 96 * 2**20},
        "trainer": {"logger": {"class_path": EVIL, "init_args": {"api_key": "hunter2"}}},
    }))  # fmt: skip
    text = f"{EVIL} \x00\x1b[2J \u202e evil \ud800 and\nmore"
    samples = [{"step": step, "tokens": step, "prompt": prompt, "text": text}
               for step in range(10, 1210, 10) for prompt in ("", EVIL)]  # fmt: skip
    (run.path / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    task = {"accuracy": 0.41, "interval": [0.35, 0.48], "baseline": 0.25, "centered": 0.21, "items": 200,
            "num_fewshot": 5}  # fmt: skip
    text = {"loss": 3.0, "loss_stderr": 0.1, "bits_per_byte": 1.0, "stderr": 0.01, "tokens": 1000}
    run.append("evaluations.jsonl", {"step": 100, "checkpoint": None, "time": 1.0, "tasks": {EVIL: task}, "core": 0.21,
                           "core_interval": [0.15, 0.27], "texts": {"books": text}, "settings": {}})  # fmt: skip
    (run.path / "postmortem-00000300").mkdir()
    (run.path / "postmortem-00000300" / "postmortem.md").write_text(f"# Post-mortem {EVIL}")
    return run


# ---- what is on the page ---------------------------------------------------------------------------------------------
def test_the_page_of_a_training(tmp_path):
    folder = make_workplace(tmp_path / "work")
    config = write_config(folder, **{"samples.prompts": ["The captain"], "samples.interval": 6, "note": "Mine."})
    lm(folder, "fit", "--config", str(config))
    lm(folder, "runs", "export", "small", "--html", "small.html")
    page, run = Page(folder / "small.html"), Run(folder / "checkpoints" / "small")
    assert page.source.startswith(OPENING) and "small: finished" in page.text and "Mine." in page.text
    assert "12of 12 (100%)" in page.text and "3.07Kof 3.07K" in page.text  # steps and tokens
    losses = [line["val/loss"] for line in run.metrics("val/loss")]
    assert f"best validation loss{min(losses):.4f}" in page.text and "torch 2." in page.text
    train = page.curves()["training and validation", "loss"]
    assert train["mean"] == pytest.approx([line["train/loss"] for line in run.metrics("train/loss")], rel=1e-5)
    validation = page.curves()["training and validation", "validation loss"]
    assert len(validation["mean"]) == len(losses) == 3 and validation["points"]
    assert page.data["tables"][train["table"]]["step"] == list(range(1, 13))
    assert page.data["tables"][validation["table"]]["tokens"] == [1024, 2048, 3072]
    for text in ("model.decoder.hidden_size32", "step 12 (", "Step 12", "Step 6", "The captain"):
        assert text in page.text
    assert "val_tokens: 512" in page.text[page.text.index("All settings") :]


def test_every_metric_has_its_chart_and_its_row(place):
    page = page_of(make_rich_run(place))
    titles = [chart["title"] for chart in page.data["charts"]]
    assert titles[0] == "training and validation" and titles[-1] == "mine/entropy"
    assert [chart["place"] for chart in page.data["charts"]][-1] == "Other metrics"
    for title, label in (("loss by source", "speeches"), ("MFU", "MFU (full)"), ("learning rate", "learning rate")):
        assert (title, label) in page.curves()
    assert "number 1: loss 9.1" in page.text and "Post-mortem of step 300" in page.text
    assert "41.0% right (35.0% to 48.0%), guessing 25.0%" in page.text and "1.0000 ± 0.0196 bits per byte" in page.text
    assert page.text.count("Step 1,2") == 1 and page.text.count("Step ") == 21
    row = page.text[page.text.index("loss (train/loss)") :]
    assert row.startswith("loss (train/loss)2.06672.06671,20010.0000101202")  # the last figure: two are not finite


def test_text_of_users_and_models_is_only_text(place):
    page = page_of(make_rich_run(place))
    assert "img" not in page.tags and page.tags.count("script") == 2
    assert not [name for name, _ in page.attributes if name.startswith("on")] and "style" not in dict(page.attributes)
    assert page.text.count(EVIL) >= 7 and ("loss by source", EVIL) in page.curves()  # as they were
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", page.source)
    assert "\ufffd[2J \ufffd evil \ufffd and\nmore" in page.text


def test_secrets_are_left_out(place):
    page = page_of(make_rich_run(place))
    for secret in ("hooks.example", "on_event", "me:pass", "signature", "hunter2"):
        assert secret not in page.source
    assert "s3://bucket/data" in page.text and "api_key: (left out)" in page.text
    assert "lm fit --data.path s3://bucket/data" in page.text  # the rest of the command


def test_nothing_is_loaded_and_only_its_own_script_may_run(place):
    page = page_of(make_rich_run(place))
    addresses = [value for name, value in page.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert all(value.startswith(("#", "data:,")) for value in addresses) and "url(" not in page.source
    policy = next(value for name, value in page.attributes if value and value.startswith("default-src 'none'"))
    style = page.source.partition("<style>")[2].partition("</style>")[0]
    for source in (page.scripts[1], style):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'" in policy
    assert "Permission is hereby granted" in page.scripts[1]  # the licence of uPlot goes with it


def test_many_lines_make_a_small_page_that_keeps_the_extremes(place):
    run = write_run("checkpoints")
    with open(run.path / "metrics.jsonl", "w") as file:
        for step in range(20_000):
            loss, norm = (99.5, "NaN") if step == 12_345 else (2.0, 1.0)
            file.write(f'{{"step": {step}, "tokens": {step}, "time": {step}, "train/loss": {loss}, '
                       f'"optim/grad_norm": {norm}}}\n')  # fmt: skip
    page = page_of(run)
    loss, norm = (page.curves()[name] for name in (("training and validation", "loss"), ("gradient norm",) * 2))
    assert len(page.source) < 250_000 and len(loss["mean"]) == 1000 == len(page.data["tables"][0]["step"])
    assert loss["high"][617] == 99.5 and loss["low"][617] == 2.0 and loss["mean"][617] == pytest.approx(6.875)
    assert norm["bad"] == [617] and norm["high"][617] == 1.0
    assert "stands for up to 20 log lines" in page.text and "99.500012,345" in page.text


@pytest.mark.parametrize("lines", [
    [], [{"step": 1, "tokens": 1, "time": 1.0, "train/loss": math.nan}],
    [{"step": step, "train/loss": math.inf} for step in (1, 2, 3)], [{"step": 0, "val/loss": 1.0}],
    [{"step": 1, "tokens": math.inf, "time": math.nan, "train/loss": -1e308}],
])  # fmt: skip
def test_a_run_that_has_hardly_begun_has_a_page(place, lines):
    run = Run.create("a", "checkpoints")
    run.describe(name="a", status="failed", reason="CUDA out of memory", command=["train.py", "--size", "2"])
    for line in lines:
        run.append("metrics.jsonl", line)
    page = page_of(run)
    assert "CUDA out of memory" in page.text and ("Nothing was logged" in page.text) == (not lines)
    assert "train.py --size 2" in page.text and "lm train.py" not in page.text
    assert "Samples" not in page.text and "Evaluation" not in page.text
    shown = [value for curve in page.curves().values() for value in curve["mean"]]
    assert all(value is None or math.isfinite(value) for value in shown)


# ---- the file --------------------------------------------------------------------------------------------------------
def test_a_page_replaces_a_page_and_nothing_else(place):
    run = write_run("checkpoints")
    page_of(run)
    (place / "link.html").symlink_to("page.html")
    run.append("metrics.jsonl", {"step": 41, "mine": 7.0})
    assert ("mine", "mine") in page_of(run, "link.html").curves() and (place / "link.html").is_symlink()
    (place / "notes.html").write_text("<!doctype html>\nmine")
    for target, message in (("notes.html", "not the page of a run"), ("s3://b/a.html", "URL")):
        with pytest.raises(RequestError, match=message):
            export(str(run.path), html=target)
    assert (place / "notes.html").read_text() == "<!doctype html>\nmine"
    for target, error in ((".", "Is a directory"), ("notes.html/x", "Not a directory"), ("/proc/x/y", "No such")):
        with pytest.raises(OSError, match=error):
            export(str(run.path), html=target)
    with pytest.raises(RequestError, match="instead of the folder"):
        export(str(run.path), output="out", html="new.html")
    assert not (place / "new.html").exists() and not list(place.glob(".*"))


# ---- in a browser ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if BROWSER is None:
        pytest.skip("no browser is installed")
    with playwright.sync_playwright() as driver:
        with driver.chromium.launch(executable_path=BROWSER) as browser:
            yield browser


@pytest.fixture
def view(browser, place):
    """Opens a file; at the end nothing was printed to the console, raised, or asked from anywhere else."""
    pages, faults, requests = [], [], []

    def opened(file: str, **options):
        page = browser.new_context(offline=True, **options).new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(error.stack))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((place / file).as_uri())
        pages.append(page)
        return page

    yield opened
    for page in pages:
        page.context.close()
    assert faults == [] and all(url.startswith(place.as_uri()) for url in requests)


def hover(page, share: float, chart: int = 0) -> str:
    """What a chart's legend says where the pointer stands at a share of its width."""
    page.locator(".u-over").nth(chart).scroll_into_view_if_needed()
    box = page.locator(".u-over").nth(chart).bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 2)
    return page.locator(".legend").nth(chart).inner_text().replace("\n", " ")


def drag(page, begin: float, end: float) -> None:
    page.locator(".u-over").first.scroll_into_view_if_needed()
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + begin * box["width"], box["y"] + box["height"] / 2)  # the controls may be over its top
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], box["y"] + box["height"] / 2 + 9, steps=3)
    page.mouse.up()


def step_at(page, share: float, chart: int = 0) -> int:
    return int(re.match(r"step ([\d,]+)", hover(page, share, chart))[1].replace(",", ""))


def test_charts_zoom_together_and_tell_values(view, place):
    count = len(page_of(make_rich_run(place)).data["charts"])
    page = view("page.html", viewport={"width": 1200, "height": 900})
    assert page.locator("canvas").count() == page.locator(".plot").count() == count == 9
    assert page.evaluate("window.hacked") is None
    assert step_at(page, 0.002) < 20 and step_at(page, 0.998) > 1180
    assert re.match(r"step 60\d loss 2.13\d\d validation loss 2.2333$", hover(page, 0.5))
    drag(page, 0.25, 0.5)
    assert abs(step_at(page, 0.002) - 307) < 15 and abs(step_at(page, 0.998) - 603) < 15
    assert abs(step_at(page, 0.002, chart=2) - 307) < 15  # all charts have the same range
    page.get_by_role("radio", name="tokens").check()
    assert hover(page, 0.998).startswith("120K tokens")  # another axis is shown as a whole
    page.get_by_role("radio", name="steps").check()
    drag(page, 0.4, 0.6)
    assert step_at(page, 0.002) > 450
    page.locator(".u-over").first.dblclick()
    assert step_at(page, 0.002) < 20 and step_at(page, 0.998) > 1180
    page.get_by_role("radio", name="hours").check()
    assert re.match(r"0.1\d h", hover(page, 0.998))


def test_it_can_be_used_by_keyboard_and_controls(view, place):
    page_of(make_rich_run(place))
    page = view("page.html")
    plot, legend = page.locator(".plot").first, page.locator(".legend").first
    plot.focus()
    for key in ("ArrowRight", "+", "+", "ArrowLeft"):
        page.keyboard.press(key)
    assert legend.inner_text().startswith("step 6") and page.get_by_role("button", name="reset zoom").is_enabled()
    page.keyboard.press("0")
    assert not page.get_by_role("button", name="reset zoom").is_enabled()
    before = plot.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("log scale of losses").check()
    logarithmic = plot.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    page.get_by_label("smoothing").fill("0.6")
    smooth = plot.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    assert len({before, logarithmic, smooth}) == 3
    button = plot.get_by_role("button").first
    button.press("Enter")
    assert plot.get_by_role("button").first.get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("options", [
    {"viewport": {"width": 360, "height": 700}, "color_scheme": "dark"}, {"viewport": {"width": 1200, "height": 800}},
])  # fmt: skip
def test_it_fits_a_phone_and_a_sheet_of_paper(view, place, options):
    page_of(make_rich_run(place))
    page = view("page.html", **options)
    assert page.evaluate("document.documentElement.scrollWidth") <= options["viewport"]["width"]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
    assert dark == ("color_scheme" in options)
    if not dark:
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1200
        wide = page.locator("canvas").first.bounding_box()["width"]
        assert wide < 700 and page.locator("details:not([open])").count() == 0
        page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert page.locator("details:not([open])").count() > 3


@pytest.mark.parametrize("value", [math.nan, 3.0])
def test_a_chart_of_one_value_is_no_error(view, place, value):
    run = Run.create("a", "checkpoints")
    run.describe(name="a", status="failed", reason="of something")
    run.append("metrics.jsonl", {"step": 1, "tokens": 1, "time": 1.0, "train/loss": value})
    page_of(run)
    page = view("page.html")
    page.get_by_label("log scale of losses").check()
    shown = page.locator(".legend").first.inner_text().replace("\n", " ")
    assert shown == ("step 1 loss 3.0000" if value == 3.0 else "step 1 loss not finite")
