"""Hydra configurations; `seamless_verl.compose` puts this folder on the search path."""
