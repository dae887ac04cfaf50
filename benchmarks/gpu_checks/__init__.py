"""The checks of ``python -m benchmarks.gpu``: what a real GPU may do otherwise than the CPU platform, one by one.

registry    which checks there are, what each shows and needs, how long it may take       (light: no torch)
live        starts whole runs as a user starts them, on either platform
stage       a body in place of training, in the trainer's process of such a run
others      the checks themselves
"""
