"""opencode on one task: ``opencode_agent.py FOLDER NODE_MODULES BASE_URL API_KEY``; prints JSON, what it said last.

It works in FOLDER, and its settings and its own files are there, too.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

folder, modules, base_url, key = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:5]
model = {"name": "m", "tool_call": True, "limit": {"context": 100_000, "output": 4_000}}
provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": base_url, "apiKey": key}, "models": {"m": model}}
settings = {
    "provider": {"p": provider},
    "permission": "allow",
    "share": "disabled",
    "autoupdate": False,
    "agent": {"title": {"disable": True}},  # it would ask for a title first, in a row of its own
}
(folder / "opencode.json").write_text(json.dumps(settings))
home = {"HOME": str(folder), "PWD": str(folder), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
own = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
(program,) = modules.glob("opencode-linux-*64/bin/opencode")
command = [str(program), "run", "-m", "p/m", "count to four"]
ran = subprocess.run(command, cwd=folder, env=own | home, stdin=subprocess.DEVNULL, capture_output=True, text=True)
sys.stderr.write(ran.stderr)
sys.stdout.write(json.dumps({"said": ran.stdout.strip()}) + "\n")
sys.exit(ran.returncode)
