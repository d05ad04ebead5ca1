"""Messages about a run: what is sent to whom, at which level, without delay and without secrets in any file."""

import email
import email.policy
import json
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from aiosmtpd.controller import Controller
from trainings import equipment, lm, make_workplace, start, wait_until, write_config

from lm.errors import RequestError
from lm.runs.run import Run
from lm.training.callbacks.notifications import open_recipients

SECRET = "s3cr3t-pass"


class Inbox(ThreadingHTTPServer):
    """A web hook: keeps what is posted to it, by path."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Hook)
        self.received = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, name, secret=SECRET):
        return f"json://me:{secret}@127.0.0.1:{self.server_port}/{name}"

    def events(self, name):
        """Type and title of each message to an address, in their order."""
        return [(body["type"], body["title"].partition(": ")[2]) for path, body in self.received if path == f"/{name}"]

    def last(self, name):
        return [body for path, body in self.received if path == f"/{name}"][-1]


class Hook(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((self.path.rstrip("/"), body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def inbox():
    server = Inbox()
    yield server
    server.shutdown()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_workplace(tmp_path_factory.mktemp("notified"))


def configured(place, name, notify, **changes):
    write_config(place, name, **{"notify": notify, **changes})
    return "--config", f"{name}.yaml"


def files_with(folder, text):
    return [path.name for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_events_go_to_those_who_want_their_level_and_no_secret_is_in_a_file(place, inbox, monkeypatch):
    """Of an address with `$NAME` nothing is in the run folder; of a literal one, in config.yaml alone."""
    for name, value in (("HOOK", inbox.url("all")), ("PASSWORD", SECRET), ("PORT", str(inbox.server_port))):
        monkeypatch.setenv(name, value)
    notify = ["$HOOK", {"url": inbox.url("warned", "l1teral"), "level": "warning"},
              {"url": "json://me:$PASSWORD@127.0.0.1:${PORT}/failed", "level": "error"}]  # fmt: skip
    logger = equipment("lightning.pytorch.loggers.CSVLogger", save_dir="csv")
    changes = {
        "guards.alerts": {"step > 5": "warn", "step > 7": "warn"},
        "guards.inject_step": 10, "expect": {"val/loss": [0, 0.1]}, "trainer.logger": logger,
    }  # fmt: skip
    done = lm(place, "fit", *configured(place, "all", notify, **changes))
    # The second alert comes soon after the first one, and is told with the drill's post-mortem.
    assert inbox.events("all") == [
        ("info", "started"), ("warning", "alert"), ("warning", "post-mortem"), ("warning", "finished")
    ]  # fmt: skip
    assert inbox.events("warned") == inbox.events("all")[1:] and not inbox.events("failed")
    first, alert, later, last = (body for path, body in inbox.received if path == "/all")
    assert "12 steps to go, 3.07K tokens" in first["message"]
    assert "step > 5: at step 6" in alert["message"]
    assert "step > 7" in later["message"] and "postmortem-" in later["message"]
    for said in ("all steps done", "not all metrics are as expected", "step 12 of 12, loss ", "best validation loss",
                 "checkpoints/all", socket.gethostname()):  # fmt: skip
        assert said in last["message"]

    run = place / "checkpoints" / "all"
    assert "notify" not in done.stderr and not files_with(run, SECRET)
    assert files_with(run, "l1teral") == ["config.yaml"] and "$HOOK" in (run / "config.yaml").read_text()
    lm(place, "runs", "export", "all", "--checkpoint", "none")
    assert "l1teral" not in lm(place, "runs", "show", "all", "--json").stdout + done.stdout + done.stderr
    assert not files_with(place / "exports", "l1teral") + files_with(place / "csv", "l1teral")


def test_a_guard_that_stops_the_run_is_told_by_mail(place):
    mails = []

    class Keep:
        async def handle_DATA(self, server, session, envelope):
            mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
            return "250 OK"

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(Keep(), hostname="127.0.0.1", port=port)
    controller.start()
    try:
        address = f"mailto://127.0.0.1:{port}?smtp=127.0.0.1&from=lm@example.org&to=me@example.org&mode=insecure"
        typed = configured(place, "guarded", [address], **{"guards.alerts": {"step > 1 and grad_norm > 0": "stop"}})
        lm(place, "fit", *typed, expect=3)
    finally:
        controller.stop()
    assert [mail["Subject"] for mail in mails] == ["guarded: started", "guarded: stopped by a guard"]
    text = mails[1].get_body().get_content()
    assert "alert: step > 1" in text and "post-mortem: " in text and "--ckpt_path auto` resumes it" in text


def test_an_exception_is_told(place, inbox):
    callbacks = {"trainer.callbacks": [{"class_path": "recorder.Failing"}]}
    notify = [{"url": inbox.url("broken"), "level": "error"}]
    lm(place, "fit", *configured(place, "failed", notify, **callbacks), expect=1)
    [(path, failed)] = [(path, body) for path, body in inbox.received if path == "/broken"]
    assert (failed["type"], failed["title"]) == ("failure", "failed: failed")
    assert "ZeroDivisionError: on purpose" in failed["message"] and "resumes it" in failed["message"]


def test_after_a_signal_the_checkpoint_comes_first_and_a_service_without_an_answer_is_not_waited_for(place, inbox):
    """One accepts and says nothing, nobody listens to another: each is said once. A resume may name others."""
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = [one.getsockname()[1] for one in (silent, closed)]
        closed.close()
        notify = [inbox.url("cut"), *(f"json://me:{SECRET}@127.0.0.1:{port}/?rto=300" for port in ports)]
        changes = {"trainer.max_steps": 2000, "trainer.stop_within": 4, "guards.alerts": {"step > 1": "warn"}}
        process = start(place, "fit", *configured(place, "cut", notify, **changes))
        run = Run(place / "checkpoints" / "cut")
        wait_until(lambda: len(run.metrics("train/loss")) >= 3, process)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, said = process.communicate(timeout=100)
    assert process.returncode == 75 and time.monotonic() - began < 60 and run.status() == "interrupted"
    assert said.count("notify: ") == 2 and SECRET not in said
    assert f"127.0.0.1:{ports[0]} is not reached: no answer when the run ended" in said
    assert f"127.0.0.1:{ports[1]} is not reached: A Connection error" in said
    step, cut = max(run.steps()), inbox.last("cut")
    assert (cut["type"], cut["title"]) == ("warning", "cut: interrupted")
    assert f"after step {step} with a checkpoint" in cut["message"] and cut["message"].count("resumes it") == 1

    typed = "--trainer.max_steps", str(step + 1), "--notify", json.dumps([inbox.url("again", "an0ther")])
    resumed = lm(place, "fit", "--config", "cut.yaml", "--ckpt_path", "auto", *typed).stderr
    assert inbox.events("again") == [("info", f"resumed after step {step}"), ("info", "finished")]
    assert "notify: [" in resumed and "an0ther" not in resumed and SECRET not in resumed
    assert files_with(run.path, "an0ther") == ["config.yaml"]


def test_a_plan_names_whom_it_would_notify(place, inbox):
    typed = configured(place, "plan", [{"url": inbox.url("test"), "level": "error"}, "json://127.0.0.1:1"])
    page = lm(place, "plan", *typed).stdout
    assert f"json://me:****@127.0.0.1:{inbox.server_port}: errors" in page and SECRET not in page
    assert not inbox.events("test")


@pytest.mark.parametrize(
    ("notify", "message"),
    [
        (["$NOT_THERE"], "entry 1 ($NOT_THERE): $NOT_THERE is not set in the environment: export it"),
        (["json://x.org", f"foo://me:{SECRET}@x.org"], "entry 2 (foo://...): Apprise cannot read this address; https:"),
        ([f"tgram://{SECRET}"], "entry 1 (tgram://...): Apprise cannot read this address"),
        ([{"url": f"json://{SECRET}", "level": "eror"}], "level 'eror' must be one of info, warning, error"),
        ([{f"json://{SECRET}": "info"}], "entry 1: give an address, `ntfy://topic`, or {url"),
    ],
)
def test_what_is_no_address_is_refused_without_its_secret(notify, message):
    with pytest.raises(RequestError) as refused:
        open_recipients(notify)
    assert message in str(refused.value) and SECRET not in str(refused.value)


def test_a_plan_and_a_fit_refuse_in_one_line(place):
    for command, notify, message in (
        ("plan", [f"tgram://{SECRET}"], "entry 1 (tgram://...)"),
        ("fit", [f"tgram://{SECRET}"], "entry 1 (tgram://...)"),
        ("fit", f"json://{SECRET}", "expected a list: "),
    ):
        [line] = lm(place, command, *configured(place, "wrong", notify), expect=2).stderr.strip().splitlines()
        assert line.startswith(f"lm {command}: notify") and message in line and SECRET not in line
    assert not (place / "checkpoints" / "wrong").exists()


def test_without_apprise_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(RequestError, match="notify needs the package apprise: `pip install apprise`"):
        open_recipients(["ntfy://topic"])
