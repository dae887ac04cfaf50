"""Everything that touches verl, ray, torch or vLLM; the only package allowed to import them.

What is touched has a name in ``tests/contract/test_verl_contract.py``; a work-around carries its removal condition.
"""
