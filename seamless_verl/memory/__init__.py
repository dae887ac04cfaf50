"""What the devices of the CPU platform hold: a book per device, across processes. No torch; `book` is pure."""
