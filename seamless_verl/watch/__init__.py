"""Watching runs in a browser: reads what they record, and changes nothing."""
