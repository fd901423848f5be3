"""What the suite does, without Lightning: plans from numbers, tools on torch."""
