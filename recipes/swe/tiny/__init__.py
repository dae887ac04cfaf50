"""A software-engineering task small enough to learn on two cores: real files, real bugs, real test runs.

``assets`` builds model and data once, ``runner`` runs ``agent`` and grades what it leaves. What reinforcement learning
does here is sharpen a policy that imitates a developer who is right one time in three; it does not teach to read code.
Pass rates on unseen bodies (seed 0): 0.14 at the start, 0.44 for imitation of clean demonstrations (``imitation``).
"""
