"""Kernel of the data plane: which recorded tokens a request continues, and which rows a session trains.

Pure code: no clock, no I/O, no randomness. The edge (``seamless_verl.proxy``) brings requests and generations in and
carries rows out.
"""
