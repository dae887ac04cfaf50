"""verl chooses its platform when it is first imported, which test modules do while they are collected.

``SEAMLESS_VERL=CHECKOUT``: the verl in that folder instead of the installed one, also in processes that tests start.
"""

import os
import sys

os.environ["VERL_PLATFORM"] = "cpu"
# Ray gives its workers the lowest priority but four: beside another test's browser six of them take minutes to start.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
if "SEAMLESS_VERL" in os.environ:
    sys.path.insert(0, os.environ["SEAMLESS_VERL"])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
