"""A software-engineering task small enough to learn on two cores: real files, real bugs, real test runs."""
