#!/usr/bin/env python3
"""Shut down the rented machine when a run is over but not interrupted: `on_event: [configs/launch/power_off.py]`

The facts come as JSON on standard input: event, reason, exit_code, run, path, step, metrics, checkpoint, resume, ...;
it is started at other events, too, at which it does nothing.
Clouds bill a machine that is shut down only for its disk; if yours bills all of it, call its own command instead.
"""

import json
import subprocess
import sys

facts = json.load(sys.stdin)
if facts["event"] in ("finished", "stopped", "failed"):
    print(f"run {facts['run']} {facts['event']}: {facts['reason']}; the machine is switched off")
    subprocess.run(["sudo", "systemctl", "poweroff"], check=True)
