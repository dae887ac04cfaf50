"""The predictive policy, and what it knows of the future: decode speed, lengths, when groups will be ready."""
