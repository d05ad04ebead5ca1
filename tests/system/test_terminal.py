"""What files of others say cannot take over the terminal that it is shown on."""

import json
import logging

from lm.cli.command import main
from lm.system.process import HarmlessFormatter, harmless

TITLE = "\x1b]0;owned\x07"


def test_control_signs_are_shown_as_pictures_and_lines_stay_lines():
    assert harmless(f"a{TITLE}\tb\nc\x9b") == "a␛]0;owned␇\tb\nc␦"
    record = logging.LogRecord("lm", logging.INFO, "", 0, "model %s", (TITLE,), None)
    assert HarmlessFormatter("%(message)s").format(record) == "model ␛]0;owned␇"


def test_a_message_about_a_foreign_folder_carries_none(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [TITLE]}))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert main(["import", "--input", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    shown = capsys.readouterr().err
    assert "owned" in shown and "\x1b" not in shown and "\x07" not in shown
