"""Python processes by fork instead of by import.

A run is ten interpreters that each import torch, verl and vLLM: seconds of CPU and half a gigabyte apiece. The nursery
imports them once and forks; a stand-in takes the place of the interpreter for whoever starts processes::

    Ray, multiprocessing ──exec──► stand-in ──socket: argv, environment, files──► nursery ──fork──► the process
                                      └── waits, passes signals on, ends with the same status ◄───────┘

If the nursery is gone, the stand-in becomes the plain interpreter: nothing depends on it but speed.
Only standard library here; what is imported beforehand is an argument.
"""
