"""No test writes to the user's own registry of runs."""

import os
import tempfile

os.environ["LM_REGISTRY"] = os.path.join(tempfile.mkdtemp(prefix="lm-registry-"), "runs.db")
