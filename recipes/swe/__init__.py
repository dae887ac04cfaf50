"""Software-engineering recipe: `tiny` runs on a laptop CPU, `real` prepares SWE-bench style data for GPUs."""
