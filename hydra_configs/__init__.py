"""Hydra configurations; found by `seamless_verl.main` through the search path."""
