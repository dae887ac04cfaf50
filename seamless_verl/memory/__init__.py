"""What devices hold: the CPU platform's book of memory, and the arithmetic of what fits a GPU. No torch."""
