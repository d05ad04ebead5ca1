#!/usr/bin/env python3
"""Track the cost of a rented machine in `budget.json`, and shut the machine down when the money is spent.

    configs/launch/keep_budget.py budget.json --rate 2.49 --cap 50 --at_cap 'sudo systemctl poweroff' &
    python -m lm fit --config pretrain-350m.yaml --guards.budget.file budget.json --guards.budget.cap_usd 48

Hours count from the start of the machine, since it is paid for whether it trains or not. The cost of earlier machines
is already in the file, and is added. The training ends by itself, with a checkpoint, before its own cap; this command
shuts the machine down whatever else runs on it. It needs nothing but Python.
"""

import argparse
import json
import os
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path


def started() -> int:
    """When this machine or container was started: its first process, in ticks of the clock since the kernel's start."""
    return int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])


def hours_paid() -> float:
    """Hours since then, by a clock that nobody sets."""
    return (time.clock_gettime(time.CLOCK_BOOTTIME) - started() / os.sysconf("SC_CLK_TCK")) / 3600


def spent_before(file: Path, machine: str) -> float:
    """US dollars of machines before this one, by what the file says; 0 where there is none."""
    if not file.exists():
        return 0.0
    kept = json.loads(file.read_text())  # a damaged file is an error: to count from 0 would spend the cap twice
    return kept["spent_before_usd"] if kept["machine"] == machine else kept["spent_usd"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the budget.json to keep")
    parser.add_argument("--rate", type=float, required=True, help="US dollars an hour")
    parser.add_argument("--cap", type=float, required=True, help="US dollars; then the command runs")
    parser.add_argument("--at_cap", required=True, help="a command for the shell, such as 'sudo systemctl poweroff'")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between two looks at the clock")
    options = parser.parse_args()
    machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{started()}"
    before = spent_before(options.file, machine)
    while True:
        spent = before + hours_paid() * options.rate
        content = {
            "spent_usd": spent, "rate_usd_per_hr": options.rate, "cap_usd": options.cap, "spent_before_usd": before,
            "machine": machine, "last_update_utc": datetime.now(UTC).isoformat(),
        }  # fmt: skip
        new = options.file.with_name(f".{options.file.name}.new")
        new.write_text(json.dumps(content) + "\n")
        os.replace(new, options.file)  # a reader sees the old one or the new one
        if spent >= options.cap:
            print(f"{spent:.2f} of {options.cap:.2f} USD are spent: {options.at_cap}", flush=True)
            subprocess.run(options.at_cap, shell=True, check=True)
            return
        time.sleep(options.interval)


if __name__ == "__main__":
    main()
