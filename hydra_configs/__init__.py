"""Hydra configurations; `seamless_verl.run.compose` puts this folder on the search path."""
