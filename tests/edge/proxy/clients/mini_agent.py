"""mini-swe-agent on this machine's shell, chat completions and responses: ``mini_agent.py BASE_URL API_KEY``; JSON.

It has no streaming mode of its own.
"""

import json
import os
import sys
import tempfile

os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_GLOBAL_CONFIG_DIR": tempfile.mkdtemp()}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_response_model import LitellmResponseModel

BASE_URL, KEY = sys.argv[1:3]
report = {}
for kind in (LitellmModel, LitellmResponseModel):
    model = kind(model_name="openai/m", model_kwargs={"api_base": BASE_URL, "api_key": KEY, "drop_params": True})
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=tempfile.mkdtemp(), timeout=20),
        system_template="You can run commands.",
        instance_template="{{ task }} in words of " + kind.__name__,
        step_limit=5,
    )
    ended = agent.run("Count to three")
    report[kind.__name__] = [ended["exit_status"], ended["submission"].strip(), agent.n_calls]
sys.stdout.write(json.dumps(report) + "\n")
