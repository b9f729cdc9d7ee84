"""The model's side of the loop: advantages, packed batches, the objective, the update."""
