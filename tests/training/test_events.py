"""The program of `on_event`: what it is told and when, that no step waits for it, and that it reaches web and mail."""

import email
import email.policy
import json
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from aiosmtpd.controller import Controller
from run_folders import write_run
from trainings import lm, start, wait_until, write_config

from lm.runs.run import Run
from lm.training.callbacks import events

APPRISE = f'{Path(sys.executable).parent}/apprise -t "$LM_RUN: $LM_EVENT" -b "$LM_MESSAGE" '
KEEP = """#!/usr/bin/env python3
import json, os, sys
facts = json.load(sys.stdin)
facts["environment"] = [os.environ[f"LM_{name}"] for name in ("EVENT", "RUN", "STEP", "MESSAGE")]
print(json.dumps(facts), file=open(sys.argv[1], "a"))
"""


@pytest.fixture(scope="module")
def place(workplace):
    (workplace / "keep.py").write_text(KEEP)
    (workplace / "keep.py").chmod(0o755)
    return workplace


def configured(place, name, command=None, **changes):
    write_config(place, name, **{"on_event": command or ["./keep.py", f"{name}.jsonl"], **changes})
    return "fit", "--config", f"{name}.yaml"


def told(place, name):
    return [json.loads(line) for line in (place / f"{name}.jsonl").read_text().splitlines()]


def test_it_hears_of_start_findings_end_and_resume(place):
    """The second finding comes soon after the first: it is told with all others at the end of the quiet time."""
    changes = {"guards.alerts": {"step > 5": "warn", "step > 7": "warn"}, "expect": {"val/loss": [0, 0.1]}}
    lm(place, *configured(place, "all", **changes))
    first, alert, later, last = told(place, "all")
    assert [facts["event"] for facts in (first, alert, later, last)] == ["started", "alert", "alert", "finished"]
    assert first["message"].startswith("12 steps to go, 3.07K tokens")
    assert alert["environment"] == ["alert", "all", "6", alert["message"]] and alert["step"] == 6
    assert alert["message"].startswith("alert: step > 5: at step 6") and "step > 7" in later["message"]
    for said in ("all steps done", "see `lm runs check all`", "step 12 of 12, loss ", "validation loss ",
                 "checkpoints/all on ", socket.gethostname()):  # fmt: skip
        assert said in last["message"]
    assert (last["exit_code"], alert["exit_code"]) == (0, None)
    lm(place, *configured(place, "all", **{"trainer.max_steps": 13}), "--ckpt_path", "auto")
    assert [facts["event"] for facts in told(place, "all")[4:]] == ["resumed", "finished"]


def test_the_budget_is_an_event(place):
    budget = {"rate_usd_per_hr": 3600.0, "cap_usd": 1.0, "dry_run": True}
    lm(place, *configured(place, "paid", **{"guards.budget": budget}))
    first, *events, last = told(place, "paid")  # a fast start is warned of 80 % first
    assert (first["event"], last["event"]) == ("started", "finished") and {one["event"] for one in events} == {"budget"}
    assert "budget: " in events[-1]["message"] and events[-1]["spent_usd"] > 0.8


def test_a_failure_is_told_with_what_resumes_it(place):
    lm(place, *configured(place, "failed", **{"trainer.callbacks": [{"class_path": "recorder.Failing"}]}), expect=1)
    failed = told(place, "failed")[-1]
    assert (failed["event"], failed["exit_code"]) == ("failed", 1)
    assert "ZeroDivisionError: on purpose" in failed["message"] and "--ckpt_path auto` resumes it" in failed["message"]


@pytest.mark.slow
def test_no_step_waits_for_a_program_that_hangs_and_the_end_is_told_all_the_same(place):
    """The end of the run, which may switch the machine off, waits ten seconds for the program of the start."""
    script = '[ "$LM_EVENT" = started ] && exec sleep 300; echo $LM_EVENT > heard'
    process = start(place, *configured(place, "hangs", ["sh", "-c", script], **{"trainer.max_steps": 100_000}))
    run = Run(place / "checkpoints" / "hangs")
    wait_until(lambda: len(run.metrics("train/loss")) >= 5, process)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    process.communicate(timeout=100)
    assert process.returncode == 75 and time.monotonic() - began < 45
    assert (place / "heard").read_text() == "interrupted\n"


def test_what_takes_too_long_is_killed_and_what_fails_is_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(events, "PATIENCE", 0.5)
    for command, said in (
        (["sh", "-c", "sleep 60 & sleep 60"], "sh was killed, because it took longer than 0.5 s"),
        (["sh", "-c", "exit 3"], "sh ended with exit code 3"),
        (["/dev/null"], "/dev/null cannot be started: Permission denied"),
        (["./nowhere"], "./nowhere cannot be started: No such file or directory"),
    ):
        caplog.clear()
        program = events.EventProgram(command)
        program.start(write_run(tmp_path), "alert", "step > 5", 6)
        program._thread.finish(20.0)
        assert [record.getMessage() for record in caplog.records] == [f"on_event: {said}"]


def test_the_end_is_told_whole_though_nobody_waits_and_what_waited_is_dropped(tmp_path):
    """As when `trainer.stop_within` is over; the reason of a failure may have bytes that no variable can hold."""
    run, heard = write_run(tmp_path), tmp_path / "heard.jsonl"
    run.describe(status="failed", reason="a \0 byte")
    program = events.EventProgram(["sh", "-c", f'[ "$LM_EVENT" = alert ] && exec sleep 60; cat >> {heard}'])
    for event in ("alert", "alert", "warning"):
        program.start(run, event, "step > 5", 6)
    program.end(run, patience=0.0)
    until = time.monotonic() + 20
    while not (heard.exists() and heard.read_text().endswith("\n")) and time.monotonic() < until:
        time.sleep(0.05)
    [facts] = [json.loads(line) for line in heard.read_text().splitlines()]
    assert facts["event"] == "failed" and facts["message"].startswith("a  byte\n")


class Hook(BaseHTTPRequestHandler):
    """A web hook, which keeps what is posted to it."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((body["title"], body["message"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


def test_apprise_brings_it_to_a_web_hook_and_by_mail(place, monkeypatch):
    """Its addresses are in the environment, so that no file of the run has a password."""
    web, mails = ThreadingHTTPServer(("127.0.0.1", 0), Hook), []
    web.received, web.daemon_threads = [], True
    threading.Thread(target=web.serve_forever, daemon=True).start()

    class Keep:
        async def handle_DATA(self, server, session, envelope):
            mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
            return "250 OK"

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    post = Controller(Keep(), hostname="127.0.0.1", port=port)
    post.start()
    monkeypatch.setenv("WEB", f"json://me:s3cr3t-pass@127.0.0.1:{web.server_port}/hook")
    monkeypatch.setenv("MAIL", f"mailto://127.0.0.1:{port}?smtp=127.0.0.1&from=lm@a.org&to=me@a.org&mode=insecure")
    try:
        command = ["sh", "-c", APPRISE + '"$WEB" "$MAIL"']
        lm(place, *configured(place, "guarded", command, **{"guards.alerts": {"step > 1": "stop"}}), expect=3)
    finally:
        web.shutdown()
        post.stop()
    titles = ["guarded: started", "guarded: stopped"]
    assert [title for title, _ in web.received] == titles == [mail["Subject"] for mail in mails]
    for text in (web.received[1][1], mails[1].get_body().get_content()):
        assert "alert: step > 1" in text and "post-mortem: " in text and "step 2 of 12" in text
    files = [path for path in (place / "checkpoints" / "guarded").rglob("*") if path.is_file()]
    assert not any(b"s3cr3t-pass" in path.read_bytes() for path in files)
