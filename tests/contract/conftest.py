"""verl chooses its platform when it is first imported, which test modules do while they are collected."""

import os

os.environ["VERL_PLATFORM"] = "cpu"
