"""No test writes to the user's own registry of runs, and what tests start can be interrupted."""

import os
import signal
import tempfile

pytest_plugins = ["fault_report"]

os.environ["LM_REGISTRY"] = os.path.join(tempfile.mkdtemp(prefix="lm-registry-"), "runs.db")

# In the background of a shell SIGINT is ignored, and SIGHUP under nohup, and so they would be by every process that a
# test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
