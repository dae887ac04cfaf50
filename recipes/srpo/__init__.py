"""Two tiny sources, mathematics and code, for SRPO's curriculum: stages and History Resampling."""
