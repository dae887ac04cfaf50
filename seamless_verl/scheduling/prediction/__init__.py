"""What a policy can know about the future: decode speed, lengths, and when groups will be ready under a plan."""
