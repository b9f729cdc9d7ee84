"""Skills: the bank and its files, the curriculum's masks, the gate, and the path from a failed episode to a candidate. Never imports jax."""
